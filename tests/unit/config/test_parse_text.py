import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.config.parse_text import parse_text
from gracetune.errors import ConfigError

BILLION = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"b{level}: &b{level} [{','.join([f'*b{level - 1}' if level else '*a'] * 10)}]\n"
    for level in range(8)
)


def refusal(text, text_format):
    with pytest.raises(ConfigError) as caught:
        parse_text(text, text_format, "run")
    return str(caught.value)


def test_json_records_the_line_of_every_key():
    parsed = parse_text('{\n"a": 1, // one\n"b": [\n{"c": "x // y"},\n2]}', "json", "run")
    assert parsed.tree == {"a": 1, "b": [{"c": "x // y"}, 2]}
    assert parsed.lines == {
        ("a",): 2,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 0, "c"): 4,
        ("b", 1): 5,
    }


def test_json_without_outer_braces_is_an_object():
    assert parse_text('// as printed\n"a": 1,\n"b": {}', "json", "run").tree == {"a": 1, "b": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": 2,\n "a": 3}', "run:3:2: the key 'a' is already set in line 1"),
        ('{"a": 1,}', "run:1:8: remove this comma"),
        ('{"a": [1,]}', "run:1:9: remove this comma"),
        ("{'a': 1}", "run:1:2: expected a key in double quotes"),
        ('{"a" 1}', "run:1:6: expected ':'"),
        ('{"a": 1 "b": 2}', "run:1:9: expected ','"),
        ('{"a": tru}', "run:1:7: expected a value"),
        ('{"a": }', "run:1:7: expected a value"),
        ('{"a": 1} x', "run:1:10: expected the end"),
        ('{"a": 1', "at the end of the file"),
        ('{"a": "x\ny"}', "run:1:9: invalid control character"),
        ('{"a": "x', "unterminated string"),
        ('{"a": NaN}', "run:1:7: NaN is not a valid number"),
        ('{"a": -Infinity}', "-Infinity is not a valid number"),
        ('{"b": {"a": 1e999}}', "run:1: b.a is inf; it must be a finite number"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"a": ' + "9" * 30 + "}", "run:1: a is an integer of 100 bits; at most 64 are valid"),
        ('{"a": ["x\\ud800"]}', "run:1: a.0 is text with a lone surrogate"),
        ('{"x\\ud800": 1}', "the key 'x\\ud800' is text with a lone surrogate"),
        ("[" * 10_000, "nested more than 64 levels"),
        ("[1]", "the top level is a list; it must be an object"),
        ("3", "the top level is a number"),
        ("true", "the top level is true or false"),
        ("null", "the top level is null"),
        ('"abc"', "expected ':'"),
        (" \n", "run is empty"),
    ],
)
def test_json_errors_name_the_position(text, message):
    assert message in refusal(text, "json")


def test_yaml_scalars_follow_yaml_1_2():
    text = "a: 1e-6\nb: no\nc: 1:30\nd: 2020-01-01\ne: ~\nf:\ng: 0x10\nh: true\ni: 012\nj: 3\n"
    assert parse_text(text, "yaml", "run").tree == {
        "a": 1e-6,
        "b": "no",
        "c": "1:30",
        "d": "2020-01-01",
        "e": None,
        "f": None,
        "g": 16,
        "h": True,
        "i": 12.0,
        "j": 3,
    }


def test_yaml_records_lines_and_supports_merge_keys():
    parsed = parse_text("x: &x {p: 1}\ny:\n  <<: *x\n  q:\n    - 2\n", "yaml", "run")
    assert parsed.tree == {"x": {"p": 1}, "y": {"p": 1, "q": [2]}}
    assert parsed.lines["y", "q"] == 4
    assert parsed.lines["y", "q", 0] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "run:4:3: the key 'c' is already set in line 3"),
        ("a: [\n", "run:2:1:"),
        ("a: 1\n---\nb: 2", "run:2:1: but found another document"),
        ("a: !!python/object:os.system x", "run:1:4: could not determine a constructor"),
        ("a: &x [*x]", "nested more than 64 levels deep. No setting is: remove the inner levels"),
        (BILLION, "more than 100000 values after expanding its aliases. Remove aliases"),
        ("a: " + "[" * 3000, "nested too deeply. No setting is: remove the inner levels"),
        ("a: 0x" + "f" * 9000, "run:1: a is an integer of 36000 bits"),
        ('a: "\\ud800"', "run:1: a is text with a lone surrogate"),
        ("a: 1\nb: \x01", "run:2: special characters are not allowed"),
        ("a: .nan", "run:1: a is nan; it must be a finite number"),
        ("a: !!float x", "could not convert"),
        ("1: 2", "the top level has a key that is not text"),
        ("a:\n  b:\n    2: 3", "run:2: a.b has a key that is not text"),
        ("- 1", "the top level is a list"),
        ("# nothing", "the top level is null"),
    ],
)
def test_yaml_errors_name_the_position(text, message):
    assert message in refusal(text, "yaml")


def test_toml_records_the_lines_of_headers_and_keys():
    text = 'a = 1\n[b]\n"c" = 2\n[[d]]\ne = 1\n[[d]]\ne = 2\n[d.f] # inner\ng.h = 1\n'
    parsed = parse_text(text, "toml", "run")
    assert parsed.tree == {"a": 1, "b": {"c": 2}, "d": [{"e": 1}, {"e": 2, "f": {"g": {"h": 1}}}]}
    assert parsed.lines["b", "c"] == 3
    assert parsed.lines["d", 0, "e"] == 5
    assert parsed.lines["d", 1, "e"] == 7
    assert parsed.lines["d", 1, "f", "g", "h"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "run:1:5: invalid value"),
        ("a = 1\nb = [", "run:2:6:"),
        ("a = 1\na = 2", "run:2:6: cannot overwrite a value"),
        ("a = nan", "run:1: a is nan"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "4300 digits"),
        ("a = 0x" + "f" * 9000, "run:1: a is an integer of 36000 bits"),
        ("b = 1\na" + ".a" * 5000 + " = 1", "nested more than 64 levels deep"),
        ("[" + "a." * 5000 + "a]\nb = 1", "nested more than 64 levels deep"),
    ],
)
def test_toml_errors_name_the_position(text, message):
    assert message in refusal(text, "toml")


def test_an_unknown_format_is_refused():
    assert "'ini' is not one of json, yaml, toml" in refusal("a=1", "ini")


@given(
    text=st.text(alphabet='{}[]":,/ab1-.e\n&*!<> \t#=\x00é', max_size=40) | st.text(max_size=40),
    text_format=st.sampled_from(["json", "yaml", "toml"]),
)
@settings(max_examples=300, deadline=None)
def test_any_text_gives_an_object_or_a_config_error(text, text_format):
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_text(text, text_format, "run").tree, dict)
