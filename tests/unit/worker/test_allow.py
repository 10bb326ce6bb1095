"""The allow-list: pinned, made by the rule, and without anything that a worker must not do."""

from __future__ import annotations

import re

import pytest
import torch

from onebox.errors import WireError
from onebox.wire import overload
from onebox.worker.allow import allowed, allowed_by_rule, names_by_rule, pinned_names

PINNED_WITH = "2.13"


def test_the_pinned_list_is_what_the_rule_admits() -> None:
    if not torch.__version__.startswith(PINNED_WITH + "."):
        pytest.skip(f"the list is pinned with torch {PINNED_WITH}, this is {torch.__version__}")
    found, pinned = set(names_by_rule()), pinned_names()
    assert found == pinned, f"new: {sorted(found - pinned)}; gone: {sorted(pinned - found)}: read them, then pin them"


def test_the_pinned_list_is_a_sorted_list_of_names() -> None:
    names = sorted(pinned_names())
    assert len(names) > 1000
    assert all(re.fullmatch(r"aten\.\w+\.\w+", name) for name in names)


def test_every_pinned_operator_is_there() -> None:
    if not torch.__version__.startswith(PINNED_WITH + "."):
        pytest.skip(f"the list is pinned with torch {PINNED_WITH}, this is {torch.__version__}")
    assert all(allowed(name) is overload(name) for name in pinned_names())


@pytest.fixture(scope="module")
def schemas() -> dict[str, torch.FunctionSchema]:
    found = {}
    for name in pinned_names():
        try:
            found[name] = overload(name)._schema
        except WireError:  # of another torch
            continue
    return found


def test_nothing_writes_to_its_arguments(schemas: dict[str, torch.FunctionSchema]) -> None:
    for name, schema in schemas.items():
        assert not schema.is_mutable, name
        assert not any(a.alias_info and a.alias_info.is_write for a in (*schema.arguments, *schema.returns)), name
        assert not any(argument.is_out for argument in schema.arguments), name
        base = name.split(".")[1]
        assert not base.endswith("_") or base.endswith("__"), name


def test_nothing_takes_a_storage_a_stream_or_a_class(schemas: dict[str, torch.FunctionSchema]) -> None:
    for name, schema in schemas.items():
        for argument in schema.arguments:
            kind = str(argument.type)
            assert not re.search(r"Storage|Stream|__torch__|Any|Dict|Future|RRef|Capsule", kind), f"{name}: {kind}"


def test_text_is_never_the_name_of_a_file(schemas: dict[str, torch.FunctionSchema]) -> None:
    texts = {a.name for schema in schemas.values() for a in schema.arguments if "str" in str(a.type)}
    assert not {name for name in texts if re.search("file|path|url|name|code|expr", name)}, texts


def test_no_name_has_to_do_with_files_processes_or_other_devices() -> None:
    words = r"file|save|load|pickle|storage|print|debug|profil|record|c10d|rpc|async_|pin_memory|set_data|from_blob"
    assert [name for name in sorted(pinned_names()) if re.search(words, name) and "functional_assert" not in name] == []


@pytest.mark.parametrize(
    "name",
    [
        "aten.native_batch_norm.default", "aten.batch_norm.default", "aten.instance_norm.default",
        "aten.cudnn_batch_norm.default", "aten._copy_from.default", "aten._no_grad_embedding_renorm_.default",
        "aten.add_.Tensor", "aten.add.out", "aten.from_file.default", "aten.nonzero.default", "aten.item.default",
        "aten.set_.source_Storage", "aten.resize_.default", "aten._local_scalar_dense.default",
        "aten.is_pinned.default", "aten.record_stream.default", "aten.normal_functional.nothing", "",
    ],
)  # fmt: skip
def test_what_must_not_be_on_it(name: str) -> None:
    with pytest.raises(WireError, match="allow-list"):
        allowed(name)


@pytest.mark.parametrize(
    "name",
    [
        "aten.addmm.default", "aten.convolution.default", "aten.convolution_backward.default", "aten.view.default",
        "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default",
        "aten.native_dropout.default", "aten.embedding.default", "aten.embedding_dense_backward.default",
        "aten._log_softmax.default", "aten.nll_loss_forward.default", "aten.max_pool2d_with_indices.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.native_layer_norm.default",
        "aten._unsafe_index.Tensor", "aten.zeros.default", "aten.mul.Scalar",
    ],
)  # fmt: skip
def test_what_ordinary_models_need_is_on_it(name: str) -> None:
    assert allowed(name) is overload(name)
    assert allowed_by_rule(overload(name))


def test_unmarked_writers_are_known() -> None:
    """The reason why the rule names them: this torch does not."""
    mean, variance, x = torch.zeros(3), torch.ones(3), torch.randn(4, 3)
    norm = torch.ops.aten.native_batch_norm.default
    assert not norm._schema.is_mutable
    norm(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert mean.any(), "it no longer writes to the running mean: the rule may be shorter"
    assert not allowed_by_rule(norm)
