"use strict";

/*
The papers' listings. A line is [number, depth, text]; _ begins a subscript and ^ a superscript. `differs` says how the
listing differs from the paper's; the line numbers are the paper's. `hbm` names the matrices in HBM, and `chip` those on
the chip with their shapes. `elements` is the closed formula of the traffic.
*/

const LISTINGS = {
  "flash1 forward": {
    title: "FlashAttention, Algorithm 1",
    differs: "The steps are the paper's. Its Algorithm 2 adds scale, mask and dropout.",
    hbm: ["Q", "K", "V", "O", "l", "m"],
    chip: {
      "Q_i": "rd", "K_j": "cd", "V_j": "cd", "S_ij": "rc", "m̃_ij": "r1", "P̃_ij": "rc", "l̃_ij": "r1",
      "m_i": "r1", "l_i": "r1", "m_i^new": "r1", "l_i^new": "r1", "O_i": "rd",
    },
    elements: "2Nd + T_c (3Nd + 4N)",
    moves: "K and V are read once. For each tile of keys, Q, O, l and m are read, and O, l and m are written.",
    lines: [
      [1, 0, "Set block sizes B_c and B_r; the paper takes B_c = ⌈M / 4d⌉, B_r = min(B_c, d)"],
      [2, 0, "Initialize O = 0, l = 0, m = −∞ in HBM"],
      [3, 0, "Divide Q into T_r tiles, K and V into T_c tiles"],
      [4, 0, "Divide O, l and m into T_r tiles"],
      [5, 0, "for 1 ≤ j ≤ T_c do"],
      [6, 1, "Load K_j, V_j from HBM to on-chip SRAM"],
      [7, 1, "for 1 ≤ i ≤ T_r do"],
      [8, 2, "Load Q_i, O_i, l_i, m_i from HBM to on-chip SRAM"],
      [9, 2, "On chip, compute S_ij = Q_i K_j^T"],
      [10, 2, "On chip, compute m̃_ij = rowmax(S_ij), P̃_ij = exp(S_ij − m̃_ij), l̃_ij = rowsum(P̃_ij)"],
      [11, 2, "On chip, compute m_i^new = max(m_i, m̃_ij), l_i^new = e^{m_i − m_i^new} l_i + e^{m̃_ij − m_i^new} l̃_ij"],
      [12, 2, "Write O_i ← diag(l_i^new)^{−1} (diag(l_i) e^{m_i − m_i^new} O_i + e^{m̃_ij − m_i^new} P̃_ij V_j) to HBM"],
      [13, 2, "Write l_i ← l_i^new, m_i ← m_i^new to HBM"],
      [14, 1, "end for"],
      [15, 0, "end for"],
      [16, 0, "Return O"],
    ],
  },

  "flash1 backward": {
    title: "FlashAttention, Algorithm 4",
    differs:
      "The page leaves out dropout (lines 1, 14, 15 and 18), the mask of line 12 and the scale τ of lines 11, 21 and " +
      "22. In lines 16 and 17, P_ij and dP_ij stand for the paper's dropped matrices.",
    hbm: ["Q", "K", "V", "O", "dO", "l", "m", "dQ", "dK", "dV"],
    chip: {
      "Q_i": "rd", "K_j": "cd", "V_j": "cd", "O_i": "rd", "dO_i": "rd", "l_i": "r1", "m_i": "r1", "S_ij": "rc",
      "P_ij": "rc", "dP_ij": "rc", "D_i": "r1", "dS_ij": "rc", "dQ_i": "rd", "dK_j": "cd", "dV_j": "cd",
    },
    elements: "4Nd + T_c (5Nd + 2N)",
    moves:
      "K and V are read once, dK and dV are written once. For each tile of keys, Q, O, dO, dQ, l and m are read, and " +
      "dQ is written.",
    lines: [
      [2, 0, "Set block sizes B_c and B_r; the paper takes B_c = ⌈M / 4d⌉, B_r = min(B_c, d)"],
      [3, 0, "Divide Q into T_r tiles, K and V into T_c tiles"],
      [4, 0, "Divide O, dO, l and m into T_r tiles"],
      [5, 0, "Initialize dQ = 0, dK = 0, dV = 0 in HBM"],
      [6, 0, "for 1 ≤ j ≤ T_c do"],
      [7, 1, "Load K_j, V_j from HBM to on-chip SRAM"],
      [8, 1, "Initialize dK_j = 0, dV_j = 0 on SRAM"],
      [9, 1, "for 1 ≤ i ≤ T_r do"],
      [10, 2, "Load Q_i, O_i, dO_i, dQ_i, l_i, m_i from HBM to on-chip SRAM"],
      [11, 2, "On chip, compute S_ij = Q_i K_j^T"],
      [13, 2, "On chip, compute P_ij = diag(l_i)^{−1} exp(S_ij − m_i)"],
      [16, 2, "On chip, compute dV_j ← dV_j + P_ij^T dO_i"],
      [17, 2, "On chip, compute dP_ij = dO_i V_j^T"],
      [19, 2, "On chip, compute D_i = rowsum(dO_i ∘ O_i)"],
      [20, 2, "On chip, compute dS_ij = P_ij ∘ (dP_ij − D_i)"],
      [21, 2, "Write dQ_i ← dQ_i + dS_ij K_j to HBM"],
      [22, 2, "On chip, compute dK_j ← dK_j + dS_ij^T Q_i"],
      [23, 1, "end for"],
      [24, 1, "Write dK_j, dV_j to HBM"],
      [25, 0, "end for"],
      [26, 0, "Return dQ, dK, dV"],
    ],
  },

  "flash2 forward": {
    title: "FlashAttention-2, Algorithm 1",
    differs:
      "The steps are the paper's. It counts the states of m, l and O by j; here, the new maximum is m_i^new. Some copies " +
      "of the paper have the inverse of the diagonal matrix in line 10, which is a misprint.",
    hbm: ["Q", "K", "V", "O", "L"],
    chip: {
      "Q_i": "rd", "K_j": "cd", "V_j": "cd", "S_ij": "rc", "P̃_ij": "rc", "m_i": "r1", "m_i^new": "r1", "l_i": "r1",
      "O_i": "rd", "L_i": "r1",
    },
    elements: "2Nd + N + T_r · 2Nd",
    moves: "Q is read once, O and L are written once. For each tile of queries, K and V are read.",
    lines: [
      [1, 0, "Divide Q into T_r tiles, K and V into T_c tiles"],
      [2, 0, "Divide O and L into T_r tiles"],
      [3, 0, "for 1 ≤ i ≤ T_r do"],
      [4, 1, "Load Q_i from HBM to on-chip SRAM"],
      [5, 1, "On chip, initialize O_i = 0, l_i = 0, m_i = −∞"],
      [6, 1, "for 1 ≤ j ≤ T_c do"],
      [7, 2, "Load K_j, V_j from HBM to on-chip SRAM"],
      [8, 2, "On chip, compute S_ij = Q_i K_j^T"],
      [
        9, 2,
        "On chip, compute m_i^new = max(m_i, rowmax(S_ij)), P̃_ij = exp(S_ij − m_i^new), " +
          "l_i ← e^{m_i − m_i^new} l_i + rowsum(P̃_ij)",
      ],
      [10, 2, "On chip, compute O_i ← diag(e^{m_i − m_i^new}) O_i + P̃_ij V_j, m_i ← m_i^new"],
      [11, 1, "end for"],
      [12, 1, "On chip, compute O_i ← diag(l_i)^{−1} O_i"],
      [13, 1, "On chip, compute L_i = m_i + log(l_i)"],
      [14, 1, "Write O_i to HBM"],
      [15, 1, "Write L_i to HBM"],
      [16, 0, "end for"],
      [17, 0, "Return O and L"],
    ],
  },

  "flash2 backward": {
    title: "FlashAttention-2, Algorithm 2",
    differs:
      "The paper's line 9 also loads O_i and dQ_i. But the loop does not use O_i, and line 15 loads dQ_i. So the page " +
      "loads O_i only in line 4 and dQ_i only in line 15, and counts these bytes once.",
    hbm: ["Q", "K", "V", "O", "dO", "L", "D", "dQ", "dK", "dV"],
    chip: {
      "Q_i": "rd", "K_j": "cd", "V_j": "cd", "O_i": "rd", "dO_i": "rd", "L_i": "r1", "D_i": "r1", "S_ij": "rc",
      "P_ij": "rc", "dP_ij": "rc", "dS_ij": "rc", "dQ_i": "rd", "dK_j": "cd", "dV_j": "cd",
    },
    elements: "6Nd + N + T_c (4Nd + 2N)",
    moves:
      "O and dO are read and D is written first. K and V are read once, dK and dV are written once. For each tile of " +
      "keys, Q, dO, dQ, L and D are read, and dQ is written.",
    lines: [
      [1, 0, "Divide Q into T_r tiles, K and V into T_c tiles"],
      [2, 0, "Divide O, dO and L into T_r tiles"],
      [3, 0, "Initialize dQ = 0 in HBM"],
      [4, 0, "Compute D = rowsum(dO ∘ O) and write D to HBM"],
      [5, 0, "for 1 ≤ j ≤ T_c do"],
      [6, 1, "Load K_j, V_j from HBM to on-chip SRAM"],
      [7, 1, "Initialize dK_j = 0, dV_j = 0 on chip"],
      [8, 1, "for 1 ≤ i ≤ T_r do"],
      [9, 2, "Load Q_i, dO_i, L_i, D_i from HBM to on-chip SRAM"],
      [10, 2, "On chip, compute S_ij = Q_i K_j^T"],
      [11, 2, "On chip, compute P_ij = exp(S_ij − L_i)"],
      [12, 2, "On chip, compute dV_j ← dV_j + P_ij^T dO_i"],
      [13, 2, "On chip, compute dP_ij = dO_i V_j^T"],
      [14, 2, "On chip, compute dS_ij = P_ij ∘ (dP_ij − D_i)"],
      [15, 2, "Load dQ_i from HBM, update dQ_i ← dQ_i + dS_ij K_j, and write it back to HBM"],
      [16, 2, "On chip, compute dK_j ← dK_j + dS_ij^T Q_i"],
      [17, 1, "end for"],
      [18, 1, "Write dK_j, dV_j to HBM"],
      [19, 0, "end for"],
      [20, 0, "Return dQ, dK, dV"],
    ],
  },
};
