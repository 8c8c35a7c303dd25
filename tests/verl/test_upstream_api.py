"""The comparison of our signatures with upstream's list: what it reads, and the differences that it finds."""

from __future__ import annotations

from typing import Any

from tests.verl.upstream_api import differences, module_differences, parse, upstream_api

LIST = """
## pack.mod
- re-exports: `from .other import first, second as third`
- `LIMIT: int = 3`
- `scale(x, factor: float=1.0, *rest, wide=False, **kwargs) -> float`  @cache
- class **Batch**(Base)  @dataclass
    - `rows: int = 0`
    - `split(self, size: int=4) -> list['Batch']`
"""


def test_the_list_becomes_names_with_signatures() -> None:
    module = parse(LIST)["pack.mod"]
    assert module.exports == ["first", "third"] and module.constants == {"LIMIT": "3"}
    assert module.functions["scale"].parameters() == [
        ("x", "plain", None),
        ("factor", "plain", "1.0"),
        ("rest", "*", None),
        ("wide", "keyword", "False"),
        ("kwargs", "**", None),
    ]
    batch = module.classes["Batch"]
    assert batch.members == {"rows": "0"} and batch.methods["split"].parameters()[1] == ("size", "plain", "4")


def test_differences_are_named_and_further_keywords_are_none() -> None:
    scale = parse(LIST)["pack.mod"].functions["scale"]

    def same(x: Any, factor: float = 1.0, *rest: Any, wide: bool = False, ours: int = 1, **kwargs: Any) -> None: ...
    def renamed(y: Any, factor: float = 1.0, *rest: Any, wide: bool = False, **kwargs: Any) -> None: ...
    def other(x: Any, factor: float = 2.0, *rest: Any, wide: bool = False, **kwargs: Any) -> None: ...

    assert differences(same, scale) == []
    assert len(differences(renamed, scale)) == 2
    assert differences(other, scale) == ["scale: factor=2.0, upstream factor=1.0"]


def test_upstreams_list_is_read_as_a_whole() -> None:
    api = upstream_api()
    assert {"verl.protocol", "verl.single_controller.ray.base", "verl.utils.device"} <= set(api)
    assert {"concat", "union", "save_to_disk"} <= set(api["verl.protocol"].classes["DataProto"].methods)
    for module in api.values():
        for function in [*module.functions.values(), *(m for c in module.classes.values() for m in c.methods.values())]:
            function.parameters()
    assert module_differences("verl.utils.torch_functional", "masked_mean", "postprocess_data") == []
