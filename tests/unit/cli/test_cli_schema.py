import argparse
import json

from gracetune.cli import schema
from gracetune.config.schema import RunFile


def test_the_verb_prints_the_schema(capsys):
    parser = argparse.ArgumentParser()
    schema.add_arguments(parser)
    assert schema.run(parser.parse_args([])) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["properties"]) == set(RunFile.model_fields)
