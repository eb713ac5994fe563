"use strict";

/*
The algorithms of algorithms.py on a machine with two memories, HBM and the chip. Each algorithm is a generator that
yields the number of the listing's line it has just done. A matrix is a list of rows; a vector has rows of one number.
*/

const BYTES = 2; // of every element, as in fp16
const HIDDEN = -1e30; // the score of a key that a causal mask hides; finite, so that S - m is a number

const matrix = (rows, columns, value) => Array.from({ length: rows }, () => Array(columns).fill(value));
const transpose = (a) => a[0].map((_, column) => a.map((row) => row[column]));
const dot = (x, y) => x.reduce((sum, value, k) => sum + value * y[k], 0);
function times(a, b) {
  const columns = transpose(b);
  return a.map((row) => columns.map((column) => dot(row, column)));
}

/** Apply f to the elements of matrices. A vector counts for all columns. */
const map = (f, a, ...others) =>
  a.map((row, r) => row.map((value, c) => f(value, ...others.map((b) => b[r][b[r].length === 1 ? 0 : c]))));
const add = (a, b) => map((x, y) => x + y, a, b);
const scaled = (factor, a) => map((x, y) => x * y, a, factor);
const expDifference = (a, b) => map((x, y) => Math.exp(x - y), a, b);
const maximum = (a, b) => map(Math.max, a, b);
const rowMax = (a) => a.map((row) => [Math.max(...row)]);
const rowSum = (a) => a.map((row) => [row.reduce((x, y) => x + y)]);

function tiles(N, size, from = 0, index = 1) {
  return from >= N ? [] : [{ index, from, to: Math.min(from + size, N) }, ...tiles(N, size, from + size, index + 1)];
}

/** HBM and the chip: counts the elements that move between them, and remembers what the last step touched. */
class Machine {
  constructor(hbm) {
    Object.assign(this, { hbm, chip: {}, onChip: {}, touched: {}, finished: [], tile: {}, read: 0, written: 0 });
  }

  /** Copy a tile of each named matrix to the chip, where it is called for example Q_i. */
  load(names, letter, tile) {
    return names.map((name) => {
      this.read += this.move(name, tile, "read");
      this.onChip[name] = tile;
      return this.keep(`${name}_${letter}`, this.hbm[name].slice(tile.from, tile.to));
    });
  }

  store(name, tile, rows) {
    this.hbm[name].splice(tile.from, rows.length, ...rows);
    this.written += this.move(name, tile, "written");
    this.onChip[name] = tile;
  }

  move(name, tile, how) {
    (this.touched[name] ??= []).push({ ...tile, how });
    return (tile.to - tile.from) * this.hbm[name][0].length;
  }

  keep(name, rows) {
    return (this.chip[name] = rows);
  }

  /** Free everything on the chip, except the tiles with these letters. */
  free(...letters) {
    const stays = (name) => letters.some((letter) => name.endsWith(`_${letter}`));
    for (const name of Object.keys(this.chip).filter((name) => !stays(name))) delete this.chip[name];
    for (const name of Object.keys(this.onChip)) {
      if (!Object.keys(this.chip).some((kept) => kept.startsWith(`${name}_`))) delete this.onChip[name];
    }
  }
}

const isHidden = (i, j, causal) => causal && j.from >= i.to;

function mask(S, i, j, causal) {
  return S.map((row, r) => row.map((value, c) => (causal && j.from + c > i.from + r ? HIDDEN : value)));
}

function* flash1Forward(machine, { N, d, B_r, B_c, causal }) {
  Object.assign(machine.hbm, { O: matrix(N, d, 0), l: matrix(N, 1, 0), m: matrix(N, 1, -Infinity) });
  yield 2;
  for (const j of tiles(N, B_c)) {
    machine.tile = { j };
    const [K, V] = machine.load(["K", "V"], "j", j);
    yield 6;
    for (const i of tiles(N, B_r)) {
      if (isHidden(i, j, causal)) continue;
      machine.tile = { i, j };
      const [Q, O, l, m] = machine.load(["Q", "O", "l", "m"], "i", i);
      yield 8;
      const S = machine.keep("S_ij", mask(times(Q, transpose(K)), i, j, causal));
      yield 9;
      const mTile = machine.keep("m̃_ij", rowMax(S));
      const P = machine.keep("P̃_ij", expDifference(S, mTile));
      const lTile = machine.keep("l̃_ij", rowSum(P));
      yield 10;
      const mNew = machine.keep("m_i^new", maximum(m, mTile));
      const ofOld = scaled(expDifference(m, mNew), l);
      const ofTile = expDifference(mTile, mNew);
      const lNew = machine.keep("l_i^new", add(ofOld, scaled(ofTile, lTile)));
      yield 11;
      const sum = add(scaled(ofOld, O), scaled(ofTile, times(P, V)));
      machine.store("O", i, machine.keep("O_i", map((x, y) => x / y, sum, lNew)));
      yield 12;
      machine.store("l", i, machine.keep("l_i", lNew));
      machine.store("m", i, machine.keep("m_i", mNew));
      yield 13;
      machine.finished.push({ i, j });
      machine.free("j");
    }
    machine.free();
  }
  yield 16;
}

function* flash1Backward(machine, { N, d, B_r, B_c, causal }) {
  Object.assign(machine.hbm, { dQ: matrix(N, d, 0), dK: matrix(N, d, 0), dV: matrix(N, d, 0) });
  yield 5;
  for (const j of tiles(N, B_c)) {
    machine.tile = { j };
    const [K, V] = machine.load(["K", "V"], "j", j);
    yield 7;
    let [dK, dV] = ["dK_j", "dV_j"].map((name) => machine.keep(name, matrix(j.to - j.from, d, 0)));
    yield 8;
    for (const i of tiles(N, B_r)) {
      if (isHidden(i, j, causal)) continue;
      machine.tile = { i, j };
      const [Q, O, dO, dQ, l, m] = machine.load(["Q", "O", "dO", "dQ", "l", "m"], "i", i);
      yield 10;
      const S = machine.keep("S_ij", mask(times(Q, transpose(K)), i, j, causal));
      yield 11;
      const P = machine.keep("P_ij", map((x, y) => x / y, expDifference(S, m), l));
      yield 13;
      dV = machine.keep("dV_j", add(dV, times(transpose(P), dO)));
      yield 16;
      const dP = machine.keep("dP_ij", times(dO, transpose(V)));
      yield 17;
      const D = machine.keep("D_i", rowSum(map((x, y) => x * y, dO, O)));
      yield 19;
      const dS = machine.keep("dS_ij", map((p, dp, D_i) => p * (dp - D_i), P, dP, D));
      yield 20;
      machine.store("dQ", i, machine.keep("dQ_i", add(dQ, times(dS, K))));
      yield 21;
      dK = machine.keep("dK_j", add(dK, times(transpose(dS), Q)));
      yield 22;
      machine.finished.push({ i, j });
      machine.free("j");
    }
    machine.tile = { j };
    machine.store("dK", j, dK);
    machine.store("dV", j, dV);
    yield 24;
    machine.free();
  }
  yield 26;
}

function* flash2Forward(machine, { N, d, B_r, B_c, causal }) {
  Object.assign(machine.hbm, { O: matrix(N, d, NaN), L: matrix(N, 1, NaN) });
  for (const i of tiles(N, B_r)) {
    machine.tile = { i };
    const rows = i.to - i.from;
    const [Q] = machine.load(["Q"], "i", i);
    yield 4;
    let O = machine.keep("O_i", matrix(rows, d, 0));
    let l = machine.keep("l_i", matrix(rows, 1, 0));
    let m = machine.keep("m_i", matrix(rows, 1, -Infinity));
    yield 5;
    for (const j of tiles(N, B_c)) {
      if (isHidden(i, j, causal)) continue;
      machine.tile = { i, j };
      const [K, V] = machine.load(["K", "V"], "j", j);
      yield 7;
      const S = machine.keep("S_ij", mask(times(Q, transpose(K)), i, j, causal));
      yield 8;
      const mNew = machine.keep("m_i^new", maximum(m, rowMax(S)));
      const P = machine.keep("P̃_ij", expDifference(S, mNew));
      const shrunk = expDifference(m, mNew);
      l = machine.keep("l_i", add(scaled(shrunk, l), rowSum(P)));
      yield 9;
      O = machine.keep("O_i", add(scaled(shrunk, O), times(P, V)));
      m = machine.keep("m_i", mNew);
      yield 10;
      machine.finished.push({ i, j });
      machine.free("i");
    }
    machine.tile = { i };
    O = machine.keep("O_i", map((x, y) => x / y, O, l));
    yield 12;
    const L = machine.keep("L_i", map((x, y) => x + Math.log(y), m, l));
    yield 13;
    machine.store("O", i, O);
    yield 14;
    machine.store("L", i, L);
    yield 15;
    machine.free();
  }
  yield 17;
}

function* flash2Backward(machine, { N, d, B_r, B_c, causal }) {
  const unwritten = { D: matrix(N, 1, NaN), dK: matrix(N, d, NaN), dV: matrix(N, d, NaN) };
  Object.assign(machine.hbm, { dQ: matrix(N, d, 0), ...unwritten });
  yield 3;
  for (const i of tiles(N, B_r)) {
    machine.tile = { i };
    const [dO, O] = machine.load(["dO", "O"], "i", i);
    machine.store("D", i, machine.keep("D_i", rowSum(map((x, y) => x * y, dO, O))));
    yield 4;
    machine.free();
  }
  for (const j of tiles(N, B_c)) {
    machine.tile = { j };
    const [K, V] = machine.load(["K", "V"], "j", j);
    yield 6;
    let [dK, dV] = ["dK_j", "dV_j"].map((name) => machine.keep(name, matrix(j.to - j.from, d, 0)));
    yield 7;
    for (const i of tiles(N, B_r)) {
      if (isHidden(i, j, causal)) continue;
      machine.tile = { i, j };
      const [Q, dO, L, D] = machine.load(["Q", "dO", "L", "D"], "i", i);
      yield 9;
      const S = machine.keep("S_ij", mask(times(Q, transpose(K)), i, j, causal));
      yield 10;
      const P = machine.keep("P_ij", expDifference(S, L));
      yield 11;
      dV = machine.keep("dV_j", add(dV, times(transpose(P), dO)));
      yield 12;
      const dP = machine.keep("dP_ij", times(dO, transpose(V)));
      yield 13;
      const dS = machine.keep("dS_ij", map((p, dp, D_i) => p * (dp - D_i), P, dP, D));
      yield 14;
      const [dQ] = machine.load(["dQ"], "i", i);
      machine.store("dQ", i, machine.keep("dQ_i", add(dQ, times(dS, K))));
      yield 15;
      dK = machine.keep("dK_j", add(dK, times(transpose(dS), Q)));
      yield 16;
      machine.finished.push({ i, j });
      machine.free("j");
    }
    machine.tile = { j };
    machine.store("dK", j, dK);
    machine.store("dV", j, dV);
    yield 18;
    machine.free();
  }
  yield 20;
}

const ALGORITHMS = {
  "flash1 forward": flash1Forward,
  "flash1 backward": flash1Backward,
  "flash2 forward": flash2Forward,
  "flash2 backward": flash2Backward,
};

const isExample = ({ N, d, seed }, example) => seed === 0 && N === example.Q.length && d === example.Q[0].length;

/** Return Q, K, V and dO: the example for seed 0 and its sizes, otherwise random multiples of 1/4 (mulberry32). */
function inputs({ N, d, seed }, example) {
  if (isExample({ N, d, seed }, example)) return structuredClone(example);
  let state = seed;
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const draw = () => matrix(N, d, 0).map((row) => row.map(() => Math.floor(13 * random() - 6) / 4));
  return { Q: draw(), K: draw(), V: draw(), dO: draw() };
}

/** Run a settings' algorithm for `count` steps. Return the machine, the line of the last step, and the steps done. */
function run(settings, example, count) {
  const machine = new Machine(inputs(settings, example));
  if (settings.pass === "backward") {
    for (const _ of ALGORITHMS[`${settings.algorithm} forward`](machine, settings));
    Object.assign(machine, new Machine(machine.hbm));
  }
  const steps = ALGORITHMS[`${settings.algorithm} ${settings.pass}`](machine, settings);
  let [done, line] = [0, null];
  while (done < count) {
    machine.touched = {};
    const step = steps.next();
    if (step.done) break;
    [done, line] = [done + 1, step.value];
  }
  return { machine, line, steps: done };
}

/** Return the bytes that standard attention reads and writes: FlashAttention, Algorithm 0, and Algorithm 3 backward. */
function standardBytes({ N, d, pass }) {
  const [square, row] = [N * N, N * d];
  const forward = [2 * square + 3 * row, 2 * square + row];
  const backward = [5 * square + 5 * row, 2 * square + 3 * row];
  const [read, written] = pass === "forward" ? forward : backward;
  return { read: BYTES * read, written: BYTES * written };
}
