from bench.attention.shapes import CELLS, Cell


def test_the_cells_are_the_papers_and_our_own():
    cells = {cell.name: cell for cell in CELLS}
    assert len(cells) == len(CELLS) == 4 * 6 + 2 + 1 + 1
    for head_dim in (64, 128):
        for mask in ("causal", "full"):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                cell = cells.pop(f"d{head_dim}_{mask}_{length}")
                assert cell.batch * cell.seq_len == 16384 and cell.heads * cell.head_dim == 2048
                assert (cell.seq_len, cell.head_dim, cell.causal) == (length, head_dim, mask == "causal")
    assert cells == {
        "d80_causal_2048": Cell("d80_causal_2048", 8, 2048, 32, 80, causal=True),
        "d80_causal_8192": Cell("d80_causal_8192", 2, 8192, 32, 80, causal=True),
        "gpt2": Cell("gpt2", 32, 1024, 12, 64, causal=True, packed=True),
        "64k": Cell("64k", 1, 65536, 12, 64, causal=True),
    }
