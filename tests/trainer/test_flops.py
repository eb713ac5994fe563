import pytest
import torch

from trainer.flops import attention_flops, model_flops_per_token, peak_flops

BF16 = torch.bfloat16


def test_gpt2_124m_by_hand():
    """GPT-2 small, 50,257 tokens, 12 layers, d 768; without its 1024 x 768 position table.

    token table        50,257 x 768                         = 38,597,376
    a layer            qkv 768 x 2,304 + 2,304              =  1,771,776
                       proj 768 x 768 + 768                 =    590,592
                       fc 768 x 3,072 + 3,072               =  2,362,368
                       fc2 3,072 x 768 + 768                =  2,360,064
                       two LayerNorms 2 x 2 x 768           =      3,072
                                                              7,087,872, times 12 = 85,054,464
    last LayerNorm     2 x 768                              =      1,536
    N                                                       = 123,653,376
    6 N                                                     = 741,920,256
    12 L d T           12 x 12 x 768 x 1,024                = 113,246,208
    """
    n_params = 38_597_376 + 12 * 7_087_872 + 1_536
    assert n_params == 123_653_376
    assert model_flops_per_token(n_params, 12, 768, 1024) == 741_920_256 + 113_246_208 == 855_166_464
    assert model_flops_per_token(n_params, 12, 768, 1024, causal=True) == 741_920_256 + 56_623_104 == 798_543_360
    assert model_flops_per_token(n_params, 12, 768, 1024, kept=0.25) == 741_920_256 + 28_311_552


def test_the_papers_throughput_in_tokens_becomes_their_tflops():
    """nanoGPT on an H200: 506k tokens/s of GPT-2 124M (padded to 50,304 tokens, no biases) were 433 TFLOP/s."""
    n_params = 50_304 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    assert 506e3 * model_flops_per_token(n_params, 12, 768, 1024) / 1e12 == pytest.approx(433, rel=0.005)


def test_attention_by_hand():
    """Batch 1, 32 heads of 64, 16k tokens: 4 x 32 x 16,384^2 x 64 = 2^2 x 2^5 x 2^28 x 2^6 = 2^41."""
    shape = dict(batch=1, heads=32, seq_len=16_384, head_dim=64)
    assert attention_flops(**shape, causal=False, pass_="forward") == 2**41
    assert attention_flops(**shape, causal=True, pass_="forward") == 2**40
    assert attention_flops(**shape, causal=False, pass_="backward") == 2.5 * 2**41
    assert attention_flops(**shape, causal=True, pass_="both") == 3.5 * 2**40


def test_kernel_and_model_count_the_same_forward_work():
    """A model step counts three attention forwards: 12 d T per token and layer is 3 x 4 B H T^2 D over B T tokens."""
    forward = attention_flops(2, 12, 1024, 64, causal=False, pass_="forward")
    assert 3 * forward / (2 * 1024) == model_flops_per_token(0, 1, 768, 1024)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_known_peaks(name, tflops, dtype):
    assert peak_flops(name, dtype) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GB200",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI250X/MI250",
    ],
)
def test_a_device_that_only_resembles_a_known_one_has_no_peak(name):
    assert peak_flops(name, BF16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_have_no_peak(dtype):
    assert peak_flops("NVIDIA H200", dtype) is None
