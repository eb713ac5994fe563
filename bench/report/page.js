"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const SYMBOLS = 6; // of each run in a chart
const view = { x: "tokens", logx: false, logy: false, hidden: new Set() };

function trace(chart, run, number) {
  const { rows, values } = run.y[chart.key] ?? { rows: [], values: [] };
  const x = run.x[view.x];
  const shown = x.length ? rows : []; // a run that timed nothing has no place on the axis of time
  return {
    x: shown.map((row) => x[row]),
    y: x.length ? values : [],
    name: run.label,
    visible: !view.hidden.has(number),
    mode: "lines",
    line: { color: run.colour, dash: run.dash === "none" ? "solid" : run.dash, width: run.width },
    hovertemplate: `%{y:${chart.hover}}  %{fullData.name}<extra></extra>`,
  };
}

/** Puts symbols on a few points of a curve, each run on points of its own, so that curves that coincide show all. */
function symbols(run, number, curve) {
  const points = curve.y.flatMap((value, point) => (value === null ? [] : [point]));
  const count = Math.min(SYMBOLS, Math.ceil(points.length / page.runs.length));
  const places = Array.from({ length: count }, (_, n) => (n + (number + 0.5) / page.runs.length) / count);
  const chosen = places.map((place) => points[Math.floor(place * points.length)]);
  return {
    x: chosen.map((point) => curve.x[point]),
    y: chosen.map((point) => curve.y[point]),
    visible: curve.visible,
    mode: "markers",
    marker: { size: 9, symbol: run.symbol, color: run.colour },
    cliponaxis: false,
    hoverinfo: "skip",
  };
}

/** Marks the points of a curve from which on a resumed run had other settings. */
function marks(chart, run, curve) {
  const changes = curve.x.length ? Object.entries(run.y[chart.key].changes) : [];
  return {
    x: changes.map(([point]) => curve.x[point]),
    y: changes.map(([point]) => curve.y[point]),
    text: changes.map(([, settings]) => settings),
    visible: curve.visible,
    mode: "markers+text",
    marker: { size: 10, symbol: "diamond", color: run.colour },
    textposition: "top center",
    textfont: { size: 10 },
    cliponaxis: false,
    hoverinfo: "skip",
  };
}

function layout(chart) {
  const titles = { tokens: "tokens", step: "optimizer steps", time: `${page.unit} of training` };
  return {
    xaxis: {
      title: { text: titles[view.x], standoff: 8 },
      type: view.logx ? "log" : "linear",
      hoverformat: view.x === "time" ? ",.2f" : ",d",
      spikedash: "solid",
      zeroline: false,
      nticks: 7,
    },
    yaxis: {
      type: view.logy || chart.log ? "log" : "linear",
      rangemode: chart.from_zero ? "tozero" : "normal",
      tickformat: chart.ticks,
      zeroline: false,
      nticks: 6,
      automargin: true,
    },
    uirevision: [view.x, view.logx, view.logy].join(), // a zoom outlives hiding a run, not another axis
    hovermode: "x unified",
    hoverdistance: 40,
    showlegend: false,
    margin: { l: 44, r: 8, t: 8, b: 40 },
    font: { family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
  };
}

/** Lets the style of print scale the drawing, which plotly sizes in pixels. */
function makeScalable(chart) {
  for (const drawing of chart.querySelectorAll(".main-svg")) {
    const [width, height] = [drawing.getAttribute("width"), drawing.getAttribute("height")];
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.style.setProperty("--shape", `${width} / ${height}`);
  }
}

function draw() {
  for (const element of document.querySelectorAll(".chart")) {
    const chart = page.charts.find(({ key }) => key === element.dataset.key);
    const isNew = !element.data;
    const curves = page.runs.map((run, number) => trace(chart, run, number));
    const diamonds = page.runs.map((run, number) => marks(chart, run, curves[number]));
    const runs = page.runs.map((run, number) => symbols(run, number, curves[number]));
    Plotly.react(element, [...curves, ...runs, ...diamonds.filter(({ x }) => x.length)], layout(chart), {
      displayModeBar: false,
      responsive: true,
    });
    if (isNew) element.on("plotly_afterplot", () => makeScalable(element));
    makeScalable(element);
  }
}

/** Sorts by a column: numbers by size, then words; what is missing stays last. A second click turns it round. */
function sortBy(header) {
  const descending = header.ariaSort === "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const body = header.closest("table").tBodies[0];
  const rank = (cell) => ("order" in cell.dataset ? 0 : cell.textContent === "-" ? 2 : 1);
  const ordered = [...body.rows].sort((one, other) => {
    const [a, b] = [one.cells[header.cellIndex], other.cells[header.cellIndex]];
    const order = rank(a) ? a.textContent.localeCompare(b.textContent) : a.dataset.order - b.dataset.order;
    return rank(a) - rank(b) || (descending ? -order : order);
  });
  body.append(...ordered);
}

for (const input of document.querySelectorAll("#controls input")) {
  input.addEventListener("change", () => {
    view[input.name] = input.type === "radio" ? input.value : input.checked;
    draw();
  });
}

document.querySelectorAll("#legend button").forEach((entry, number) => {
  entry.addEventListener("click", () => {
    const hides = view.hidden.has(number) ? !view.hidden.delete(number) : !!view.hidden.add(number);
    entry.setAttribute("aria-pressed", !hides);
    draw();
  });
});

for (const header of document.querySelectorAll("th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}

draw();

// On paper nothing can be unfolded.
let unfolded = [];
matchMedia("print").addEventListener("change", ({ matches }) => {
  if (matches) unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const part of unfolded) part.open = matches;
});
