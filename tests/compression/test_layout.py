"""Sizes follow from shapes and k alone."""

import pytest

from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec


def layout_of(*shapes, k=64):
    return PayloadLayout([TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)], CodecSpec(k=k))


@pytest.mark.parametrize(("k", "record_bytes"), [(16, 28), (32, 48), (64, 84), (128, 148), (256, 260), (512, 452)])
def test_record_size_is_k_times_low_bits_plus_four_k_bits_plus_levels(k, record_bytes):
    low_bits = {16: 8, 32: 7, 64: 6, 128: 5, 256: 4, 512: 3}[k]
    assert CodecSpec(k=k).record_bytes == record_bytes == (k * low_bits + 2 * k + 2 * k) // 8 + 4


@pytest.mark.parametrize(
    ("elements", "total_bytes"),
    [
        (1, 1 + 4),
        (4, 1 + 4),
        (5, 2 + 4),
        (63, 16 + 4),
        (64, 84),
        (4095, 84),
        (4096, 84),
        (4097, 84 + 1 + 4),
        (4096 + 63, 84 + 16 + 4),
        (4096 + 64, 84 + 84),
        (3 * 4096, 3 * 84),
    ],
)
def test_length_is_the_sum_of_record_sizes(elements, total_bytes):
    layout = layout_of((elements,))
    assert layout.total_bytes == total_bytes
    assert layout.tensors[0].length_bytes == total_bytes


def test_tensors_follow_one_another_in_the_given_order():
    layout = layout_of((3, 5000), (7,), (), (4096, 2))
    assert [tensor.spec.name for tensor in layout.tensors] == ["t0", "t1", "t2", "t3"]
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset_bytes == end
        end += tensor.length_bytes
    assert layout.total_bytes == end
    assert layout.parameters == 15000 + 7 + 1 + 8192


def test_one_billion_parameters_take_the_published_share():
    layout = layout_of((1_100_000, 1000))
    assert layout.bits_per_parameter == pytest.approx(0.164, abs=5e-4)
    assert layout.total_bytes == pytest.approx(22.6e6, rel=2e-3)


def test_equal_layouts_compare_equal_whatever_sequence_they_came_from():
    specs = [TensorSpec("a", (2, 3)), TensorSpec("b", (4,))]
    assert PayloadLayout(specs, CodecSpec(k=16)) == PayloadLayout(tuple(specs), CodecSpec(k=16))
    assert PayloadLayout(specs, CodecSpec(k=16)) != PayloadLayout(specs, CodecSpec(k=32))


@pytest.mark.parametrize("k", [-64, 0, 1, 8, 17, 63, 96, 1024, 4096])
def test_k_outside_the_rule_is_refused_with_value_and_remedy(k):
    with pytest.raises(ValueError, match=rf"k {k} must be .*choose"):
        CodecSpec(k=k)


def test_other_chunks_and_codecs_are_refused():
    with pytest.raises(ValueError, match="chunk 2048"):
        CodecSpec(chunk=2048)
    with pytest.raises(ValueError, match="'ef3-4096'"):
        CodecSpec(codec_id="ef3-4096")


def test_impossible_tensors_are_refused():
    with pytest.raises(ValueError, match="empty"):
        TensorSpec("", (3,))
    with pytest.raises(ValueError, match=r"'w' has shape \(3, 0\)"):
        TensorSpec("w", (3, 0))
    with pytest.raises(ValueError, match="listed twice"):
        PayloadLayout([TensorSpec("w", (3,)), TensorSpec("w", (3,))], CodecSpec())
    with pytest.raises(ValueError, match="no tensors"):
        PayloadLayout([], CodecSpec())
