from bench.attention.shapes import SHAPES, AttentionShape


def test_the_shapes_are_the_papers_and_our_own():
    shapes = {shape.name: shape for shape in SHAPES}
    assert len(shapes) == len(SHAPES) == 4 * 6 + 2 + 1 + 1
    for head_dim in (64, 128):
        for mask in ("causal", "full"):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                shape = shapes.pop(f"d{head_dim}_{mask}_{length}")
                assert shape.batch * shape.seq_len == 16384 and shape.heads * shape.head_dim == 2048
                assert (shape.seq_len, shape.head_dim, shape.causal) == (length, head_dim, mask == "causal")
    assert shapes == {
        "d80_causal_2048": AttentionShape("d80_causal_2048", 8, 2048, 32, 80, causal=True),
        "d80_causal_8192": AttentionShape("d80_causal_8192", 2, 8192, 32, 80, causal=True),
        "gpt2": AttentionShape("gpt2", 32, 1024, 12, 64, causal=True, packed=True),
        "64k": AttentionShape("64k", 1, 65536, 12, 64, causal=True),
    }
