"""The code in the docs runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from actors.environment import make_family

EXTEND = Path(__file__).parents[2] / "docs" / "extend.md"


def test_the_environment_of_the_docs_works() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", EXTEND.read_text(), re.DOTALL)
    exec(compile(code, str(EXTEND), "exec"), {"__name__": "docs_example"})
    family = make_family("echo", {})
    environment = family.environment(family.task("train", 3))
    assert asyncio.run(environment.reset()) == "say t3:"
    result = asyncio.run(environment.step("t3"))
    assert (result.done, result.reward) == (True, 1.0)
    assert family.task("heldout", 3).task_id != family.task("train", 3).task_id
