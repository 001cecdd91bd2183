"""The decoder against transformers' ``qwen3_5``, an implementation that nobody here wrote."""

from __future__ import annotations

import numpy as np
import pytest
from smokeworld.configurations import COUNT, Configuration, configurations
from smokeworld.stages import GOLDEN, LIMIT, error, ours, worst_errors

ALL = configurations()


def test_the_configurations_cover_what_models_vary_in() -> None:
    shapes = [configuration.shape for configuration in ALL]
    assert len(ALL) == COUNT >= 20
    assert {s.gdn.key_dim for s in shapes} == {64, 128} == {s.gdn.value_dim for s in shapes}
    assert {s.gdn.conv_width for s in shapes} == {2, 3, 4}
    assert {s.gdn.value_heads // s.gdn.key_heads for s in shapes} == {1, 2, 4}
    assert {s.heads // s.kv_heads for s in shapes} >= {1, 2, 4}
    assert min(len(c.prompt) for c in ALL) == 1
    assert max(len(c.prompt) for c in ALL) == 300


@pytest.mark.parametrize("configuration", ALL, ids=lambda c: c.id)
def test_every_stage_is_what_transformers_wrote_down(configuration: Configuration) -> None:
    got, tokens = ours(configuration)
    with np.load(GOLDEN) as golden:
        errors = worst_errors(configuration, got, golden)
        wanted = tuple(golden[f"{configuration.id}/tokens"].tolist())
    assert max(errors.values()) <= LIMIT, max(errors.items(), key=lambda item: item[1])
    assert tokens == wanted


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL, ids=lambda c: c.id)
def test_every_stage_is_what_transformers_computes(configuration: Configuration) -> None:
    from smokeworld.upstream import theirs  # needs the extra `reference`

    got, tokens = ours(configuration)
    want, their_tokens = theirs(configuration)
    assert got.keys() == want.keys()
    errors = {name: error(want[name], value) for name, value in got.items()}
    assert max(errors.values()) <= LIMIT, max(errors.items(), key=lambda item: item[1])
    assert tokens == their_tokens
