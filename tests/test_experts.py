"""Where an expert's bytes lie, and row alphas in both forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spile.architectures import open_own
from spile.architectures.reading import PROJECTIONS
from spile.architectures.spec import Experts, OwnModel
from spile.errors import CheckpointError
from spile.files.checkpoint import open_checkpoint
from spile.residency import experts
from spile.residency.experts import ExpertTable, Extent, decode_bf16, encode_bf16, read_row_alpha

Tiny = Callable[..., Path]


def open_folder(folder: Path) -> OwnModel:
    return open_own(open_checkpoint(folder))


def read(model: OwnModel, extent: Extent) -> bytes:
    return model.checkpoint.shards[extent.shard].read_bytes()[extent.offset :][: extent.nbytes]


def read_alphas(model: OwnModel, layer: int, projection: str) -> NDArray[np.uint16]:
    """Read the alphas of all experts of a layer, [E, out]."""
    stack = model.spec.layers[layer].ffn
    assert isinstance(stack, Experts)
    return read_row_alpha(model, dict(zip(PROJECTIONS, stack.glu.weights(), strict=True))[projection])


def poke(model: OwnModel, name: str, value: int, bits: int) -> None:
    """Overwrite the BF16 value at a flat position of a tensor."""
    tensor = model.checkpoint.tensors[name]
    with model.checkpoint.shards[tensor.shard].open("r+b") as file:
        file.seek(tensor.offset + 2 * value)
        file.write(bits.to_bytes(2, "little"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("group_scales", [False, True])
def test_extents_are_the_slices_of_the_stacked_tensors(
    tiny_checkpoint: Tiny, shards: int, group_scales: bool
) -> None:
    model = open_folder(tiny_checkpoint(shards=shards, group_scales=group_scales, first_k_dense_replace=1))
    table = ExpertTable(model)
    assert (table.num_layers, table.num_experts) == (4, 8)
    assert [table.is_moe(layer) for layer in range(5)] == [False, True, True, True, False]
    assert table.expert_nbytes == 3 * 128 * 128 // 4
    for layer in (1, 3):
        for expert in (0, 7):
            for projection, extent in zip(PROJECTIONS, table.extents(layer, expert), strict=True):
                stacked = model.checkpoint.read(f"model.layers.{layer}.mlp.switch_mlp.{projection}.weight")
                assert read(model, extent) == stacked[expert].tobytes()


def test_extents_of_the_bf16_form_are_its_own_tensors(golden_bf16: Path) -> None:
    model = open_folder(golden_bf16)
    _, up, _ = ExpertTable(model).extents(2, 5)
    assert read(model, up) == model.checkpoint.read("model.layers.2.mlp.experts.5.up_proj.weight").tobytes()


def test_an_expert_of_the_full_size_model_has_792576_bytes() -> None:
    assert 3 * 262_144 + (512 + 512 + 2048) * 2 == 792_576


def test_alphas_are_the_whole_tensors(tiny_checkpoint: Tiny) -> None:
    model = open_folder(tiny_checkpoint(shards=2))
    for projection in PROJECTIONS:
        alphas = read_alphas(model, 2, projection)
        assert alphas.shape == (8, 128)
        name = f"model.layers.2.mlp.switch_mlp.{projection}.row_alpha"
        assert model.checkpoint.read(name).tobytes() == alphas.tobytes()


def test_both_forms_give_the_same_alphas(tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    row_alpha = open_folder(tiny_checkpoint(hidden_size=256))
    grouped = open_folder(tiny_checkpoint(hidden_size=256, group_scales=True))
    monkeypatch.setattr(experts, "_PIECE_NBYTES", 40)  # several pieces, the last one short
    for layer in range(4):
        for projection in PROJECTIONS:
            np.testing.assert_array_equal(
                read_alphas(row_alpha, layer, projection), read_alphas(grouped, layer, projection)
            )
        for name in "qkvo":
            one, other = (
                read_row_alpha(model, getattr(model.spec.layers[layer].attention, name))
                for model in (row_alpha, grouped)
            )
            np.testing.assert_array_equal(one, other)


UP = "model.layers.1.mlp.switch_mlp.up_proj"


def test_group_scales_that_differ_in_a_row_are_refused_by_tensor_and_row(tiny_checkpoint: Tiny) -> None:
    model = open_folder(tiny_checkpoint(hidden_size=256, group_scales=True))
    poke(model, f"{UP}.scales", 2 * (3 * 128 + 17) + 1, 0x4000)
    with pytest.raises(
        CheckpointError, match=r"up_proj\.scales of model\.safetensors: expert 3, row 17 .* differ"
    ):
        read_alphas(model, 1, "up_proj")


def test_a_bias_that_is_not_minus_its_scale_is_refused_by_tensor_and_row(tiny_checkpoint: Tiny) -> None:
    model = open_folder(tiny_checkpoint(hidden_size=256, group_scales=True))
    prefix = "model.layers.0.self_attn.q_proj"
    bits = int(model.checkpoint.read(f"{prefix}.scales").reshape(-1)[2 * 9])
    poke(model, f"{prefix}.biases", 2 * 9, bits)  # plus, not minus
    with pytest.raises(CheckpointError, match=r"q_proj\.biases of model\.safetensors: row 9 .* not -scale"):
        read_row_alpha(model, model.spec.layers[0].attention.q)


def test_a_zero_alpha_may_have_a_bias_of_either_sign(tiny_checkpoint: Tiny) -> None:
    model = open_folder(tiny_checkpoint(group_scales=True))
    poke(model, f"{UP}.scales", 5, 0x0000)
    poke(model, f"{UP}.biases", 5, 0x0000)
    assert read_alphas(model, 1, "up_proj")[0, 5] == 0


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_an_alpha_that_is_not_finite_is_refused_by_tensor_and_row(tiny_checkpoint: Tiny, bits: int) -> None:
    model = open_folder(tiny_checkpoint())
    poke(model, f"{UP}.row_alpha", 2 * 128 + 3, bits)
    with pytest.raises(
        CheckpointError, match=r"up_proj\.row_alpha of model\.safetensors: expert 2, row 3 .* not finite"
    ):
        read_alphas(model, 1, "up_proj")


def test_bf16_is_the_upper_half_of_a_float32_rounded_to_nearest_even() -> None:
    assert decode_bf16(np.array([0x3F80, 0xC000, 0x0000], np.uint16)).tolist() == [1.0, -2.0, 0.0]
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)], np.float32)
    assert decode_bf16(encode_bf16(values)).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
