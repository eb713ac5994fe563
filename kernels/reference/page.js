"use strict";

const EXAMPLE = JSON.parse(document.getElementById("example").textContent);
const settings = { algorithm: "flash1", pass: "forward", causal: false, N: 4, d: 2, B_r: 2, B_c: 2, seed: 0 };
const $ = (selector) => document.querySelector(selector);
const inputsOf = [...document.querySelectorAll("#settings input")];
const KINDS = { Q: "query", dO: "query", K: "key", V: "key", "S P̃ P dP dS m̃ l̃": "score" };
let position = 0;

function element(tag, options = {}, ...children) {
  const { data = {}, ...rest } = options;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

/** Turn S_ij, K_j^T and e^{a − b} into nodes with subscripts and superscripts. */
function typeset(text) {
  const nodes = [];
  let rest = text;
  for (let found; (found = rest.match(/([_^])(\{(.*?)\}|\w+)/)); rest = rest.slice(found.index + found[0].length)) {
    const [, sign, word, inBraces] = found;
    nodes.push(rest.slice(0, found.index), element(sign === "_" ? "sub" : "sup", {}, ...typeset(inBraces ?? word)));
  }
  return [...nodes, rest];
}

function kindOf(name) {
  const base = name.split("_")[0];
  return Object.entries(KINDS).find(([names]) => names.split(" ").includes(base))?.[1] ?? "result";
}

function format(value) {
  if (Number.isNaN(value)) return "·";
  if (value === -Infinity) return "−∞";
  if (value === HIDDEN) return "−10³⁰";
  const text = value.toFixed(settings.d > 2 ? 2 : 4);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** Draw a matrix as a table. `classOf` returns the class of a row. The title of a cell is its exact value. */
function table(name, rows, caption, classOf = () => "") {
  const made = element("table", { className: `matrix ${kindOf(name)}`, data: { name } });
  made.append(element("caption", {}, ...caption));
  for (const [index, row] of rows.entries()) {
    const titled = (value) => (Number.isNaN(value) ? "not written yet" : String(value));
    const cells = row.map((value) => element("td", { title: titled(value) }, format(value)));
    made.append(element("tr", { className: classOf(index) }, ...cells));
  }
  return made;
}

function drawHbm(machine, listing) {
  const contains = (tile, row) => tile && tile.from <= row && row < tile.to;
  const tables = listing.hbm.map((name) => {
    const vector = ["l", "m", "L", "D"].includes(name);
    const rows = machine.hbm[name] ?? matrix(settings.N, vector ? 1 : settings.d, NaN);
    const touched = machine.touched[name] ?? [];
    const size = ["K", "V", "dK", "dV"].includes(name) ? settings.B_c : settings.B_r;
    const classOf = (row) =>
      [
        row % size === 0 && row > 0 && "border",
        contains(machine.onChip[name], row) && "kept",
        touched.some((tile) => contains(tile, row)) && "moved",
      ].filter(Boolean).join(" ");
    const moves = ["read", "written"].filter((how) => touched.some((tile) => tile.how === how));
    const signs = moves.map((how) =>
      element("span", { className: "sign", title: how, ariaLabel: how, role: "img" }, how === "read" ? "↓" : "↑"));
    return table(name, rows, [name, ...signs], classOf);
  });
  $("#hbm .matrices").replaceChildren(...tables);
}

function drawChip(machine, listing) {
  const sizes = { r: Math.min(settings.B_r, settings.N), c: Math.min(settings.B_c, settings.N), d: settings.d, 1: 1 };
  const tables = Object.entries(listing.chip).map(([name, [height, width]]) => {
    const rows = machine.chip[name];
    const empty = matrix(sizes[height], sizes[width], NaN);
    const made = table(name, rows ?? empty, typeset(name));
    if (!rows) made.classList.add("empty");
    if (!rows) made.querySelectorAll("td").forEach((cell) => (cell.title = "not on the chip"));
    return made;
  });
  $("#chip .matrices").replaceChildren(...tables);
}

function drawTiles(machine) {
  const [queries, keys] = [tiles(settings.N, settings.B_r), tiles(settings.N, settings.B_c)];
  const { i, j } = machine.tile;
  const stateOf = (row, column) => {
    if (isHidden(row, column, settings.causal)) return "skipped";
    if (i?.index === row.index && j?.index === column.index && Object.keys(machine.chip).length) return "current";
    const same = (tile) => tile.i.index === row.index && tile.j.index === column.index;
    return machine.finished.some(same) ? "finished" : "waiting";
  };
  const cells = queries.flatMap((row) => keys.map((column) => element("div", { className: stateOf(row, column) })));
  const grid = $("#tiles");
  grid.style.gridTemplateColumns = keys.map((tile) => `${tile.to - tile.from}fr`).join(" ");
  grid.style.gridTemplateRows = queries.map((tile) => `${tile.to - tile.from}fr`).join(" ");
  grid.replaceChildren(...cells);
  const count = (state) => cells.filter((cell) => cell.className === state).length;
  const words = `${queries.length} × ${keys.length} tiles: ${count("finished")} finished, ${count("current")} on the chip`;
  const skipped = settings.causal ? `, ${count("skipped")} skipped by the mask` : "";
  grid.ariaLabel = words + skipped;
  $("#tiles-note").textContent = `${words}${skipped}. S and P are never in HBM.`;
  if (settings.causal) $("#tiles-note").textContent += " A hidden score is −10³⁰.";
  const blind = (row, column) => row.from < column.from && !isHidden(row, column, true);
  const rescaled = settings.causal && settings.algorithm === "flash1" && settings.pass === "forward";
  if (rescaled && queries.some((row) => keys.some((column) => blind(row, column)))) {
    $("#tiles-note").textContent += " A row that sees no key of a tile has P̃ = 1 there; lines 11 and 12 multiply it by 0.";
  }
}

function drawListing(listing, line, tile) {
  $("#listing-title").textContent = listing.title;
  const items = listing.lines.map(([number, depth, text]) => {
    const item = element("li", { value: number }, ...typeset(text));
    item.style.setProperty("--depth", depth);
    if (number === line) item.ariaCurrent = "step";
    return item;
  });
  $("#listing").replaceChildren(...items);
  $("#differs").replaceChildren(...typeset(`${listing.differs} A causal mask hides scores when S is computed.`));
  const text = listing.lines.find(([number]) => number === line)?.[2];
  const at = ["i", "j"].filter((letter) => tile[letter]).map((letter) => `${letter} = ${tile[letter].index}`);
  const where = at.length && text && !text.startsWith("Return") ? ` (${at.join(", ")})` : "";
  const start = "Before the first step. The inputs are in HBM, and the chip is empty.";
  $("#line").replaceChildren(...(text ? [element("b", {}, `Line ${line}${where}: `), ...typeset(text)] : [start]));
}

function drawBytes(machine, listing, end) {
  const moved = ({ read, written }) => ({ read: BYTES * read, written: BYTES * written });
  const rows = { "so far": moved(machine), "at the end": moved(end), "standard attention": standardBytes(settings) };
  const total = ({ read, written }) => read + written;
  const most = Math.max(...Object.values(rows).map(total));
  const drawn = Object.entries(rows).map(([name, { read, written }]) => {
    const numbers = [read, written, read + written].map((count) => element("td", {}, count.toLocaleString("en")));
    const bar = element("span", { className: "bar" });
    bar.style.width = `${(100 * (read + written)) / most}%`;
    return element("tr", {}, element("th", { scope: "row" }, name, bar), ...numbers);
  });
  $("#bytes tbody").replaceChildren(...drawn);
  const share = total(rows["at the end"]) / total(rows["standard attention"]);
  const hint = share > 1 ? " Larger tiles move less: try N = 16 and B_r = B_c = 8." : "";
  $("#ratio").replaceChildren(...typeset(`At the end: ${share.toFixed(2)} times standard attention's bytes.${hint}`));
  const causal = settings.causal ? " With the causal mask, tiles without a visible pair are skipped." : "";
  const formula = `Elements: ${listing.elements}. ${listing.moves}${causal}`;
  $("#formula").replaceChildren(...typeset(formula));
}

function draw() {
  const listing = LISTINGS[`${settings.algorithm} ${settings.pass}`];
  const end = run(settings, EXAMPLE, Infinity);
  position = Math.min(position, end.steps);
  const { machine, line } = run(settings, EXAMPLE, position);
  Object.assign($("#position"), { max: end.steps, value: position });
  $("#count").textContent = `${position} of ${end.steps}`;
  for (const button of document.querySelectorAll("[data-key]")) {
    button.ariaPressed = String(String(settings[button.dataset.key]) === button.dataset.value);
  }
  for (const button of document.querySelectorAll("[data-move]")) {
    button.ariaDisabled = String(position === (["first", "previous"].includes(button.dataset.move) ? 0 : end.steps));
  }
  $("#source").textContent = isExample(settings, EXAMPLE)
    ? "The numbers are the example of python -m kernels.reference."
    : "The numbers are random. Seed 0 with N = 4 and d = 2 is the example of python -m kernels.reference.";
  $("main").classList.toggle("dense", settings.d > 4);
  drawListing(listing, line, machine.tile);
  drawChip(machine, listing);
  drawHbm(machine, listing);
  drawBytes(machine, listing, end.machine);
  drawTiles(machine);
}

function move(where) {
  position = Math.max(0, { first: 0, previous: position - 1, next: position + 1, last: Infinity }[where]);
  draw();
}

function change(values) {
  Object.assign(settings, values);
  position = 0;
  draw();
}

/** Take the numbers of all fields, or name the first one that is wrong and keep the old settings. */
function readNumbers() {
  const wrong = inputsOf.find((input) => !input.value || !input.checkValidity());
  for (const input of inputsOf) input.ariaInvalid = String(input === wrong);
  $("#problem").textContent = wrong ? `${wrong.name}=${wrong.value} must be a whole number from ${wrong.min} to ${wrong.max}.` : "";
  if (!wrong) change(Object.fromEntries(inputsOf.map((input) => [input.name, input.valueAsNumber])));
}

const KEYS = { ArrowRight: "next", ArrowLeft: "previous", Home: "first", End: "last" };
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("#settings input");
  if (!KEYS[event.key] || typing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  event.preventDefault();
  move(KEYS[event.key]);
});
$("#settings").addEventListener("submit", (event) => event.preventDefault());
$("#position").addEventListener("input", (event) => {
  position = event.target.valueAsNumber;
  draw();
});
for (const input of inputsOf) {
  input.value = settings[input.name];
  input.addEventListener("input", readNumbers);
  input.addEventListener("keydown", (event) => event.key === "Enter" && input.blur());
}
for (const button of document.querySelectorAll("[data-move]")) {
  button.addEventListener("click", () => move(button.dataset.move));
}
for (const button of document.querySelectorAll("[data-key]")) {
  const { key, value } = button.dataset;
  button.addEventListener("click", () => change({ [key]: key === "causal" ? value === "true" : value }));
}
draw();
