"""Blocks as fields of a form, and back."""

import pytest

from gracetune.hosts.simpletuner.webui import (
    WEBUI_OPTIONS,
    UNSET,
    fields_to_blocks,
    split_our_keys,
    blocks_to_fields,
)

BLOCKS = {
    "seed": 1,
    "use_gh200_trainer": True,
    "cache_config": {"vae_cache_type": "unified_memory", "host_budget_gb": 2.5},
    "gh200_optimizations": {
        "enable_uvm_hints": False,
        "batch_rampup_steps": 400,
        "placement": {"latents": "host"},
    },
}
FIELDS = {
    "seed": 1,
    "gracetune_use_gh200_trainer": "true",
    "gracetune_vae_cache_type": "unified_memory",
    "gracetune_host_budget_gb": "2.5",
    "gracetune_enable_uvm_hints": "false",
    "gracetune_batch_rampup_steps": "400",
    "gh200_optimizations": {"placement": {"latents": "host"}},
}


def test_there_and_back():
    assert blocks_to_fields(BLOCKS) == FIELDS
    assert fields_to_blocks(FIELDS) == BLOCKS


def test_dashes_and_keys_at_the_top_are_the_same_options():
    shown = blocks_to_fields(
        {"--cache_config": {"text_cache_type": "disk"}, "--enable_uvm_hints": True}
    )
    assert shown == {
        "--gracetune_text_cache_type": "disk",
        "--gracetune_enable_uvm_hints": "true",
    }
    assert fields_to_blocks(shown) == {
        "cache_config": {"text_cache_type": "disk"},
        "gh200_optimizations": {"enable_uvm_hints": True},
    }


@pytest.mark.parametrize("nothing", [None, "", UNSET])
def test_what_is_emptied_is_gone(nothing):
    assert fields_to_blocks({"gracetune_host_budget_gb": nothing}) == {}
    kept = blocks_to_fields(BLOCKS)
    assert fields_to_blocks({"gracetune_vae_cache_type": nothing}, kept) == {
        "gh200_optimizations": {"placement": {"latents": "host"}}
    }


def test_an_empty_block_still_switches_caches_on():
    assert fields_to_blocks(blocks_to_fields({"cache_config": {}})) == {"cache_config": {}}


def test_nothing_said_is_nothing_shown():
    assert blocks_to_fields({"gh200_optimizations": {"enable_uvm_hints": None}}) == {}


def test_what_is_no_number_is_left_to_be_refused():
    assert fields_to_blocks({"gracetune_host_budget_gb": "much"}) == {
        "cache_config": {"host_budget_gb": "much"}
    }
    assert fields_to_blocks({"gracetune_host_budget_gb": 3}) == {
        "cache_config": {"host_budget_gb": 3}
    }


def test_ours_and_the_rest():
    rest, ours = split_our_keys({**FIELDS, "--use_gh200_trainer": None})
    assert rest == {"seed": 1}
    assert ours == {key: value for key, value in BLOCKS.items() if key != "seed"}


def test_names_are_unique():
    assert len({option.name for option in WEBUI_OPTIONS}) == len(WEBUI_OPTIONS)
