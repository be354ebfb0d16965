"""Run validation commands, and write the checklist that shows their results."""

from datetime import UTC, datetime

import pytest

from forkport import ForkportError
from forkport.apply import start_apply
from forkport.extract import extract
from forkport.patches import VALIDATION_GROUPS, ValidationCommands
from forkport.port_state import find_state, state_folder
from forkport.report import checklist
from forkport.validation_commands import validate


def at_noon() -> datetime:
    return datetime(2030, 1, 1, 12, tzinfo=UTC)


def agree(question: str) -> None:
    """Confirm every step."""


@pytest.fixture
def ported(grow, module):
    """Return a function that finishes a port whose manifest has the given commands."""

    def port(validation: ValidationCommands):
        repo = grow({"pkg/one.py": module.replace("a = 1", "a = 10")}, {"up.txt": "up\n"})
        folder = repo.folder.parent / "patches"
        manifest = extract(repo.git, "fork", "upstream", folder, (), validation)
        start_apply(repo.git, folder, None, "port", "1", agree)
        return repo, manifest

    return port


def test_each_group_runs_on_the_right_files(ported):
    """Upstream's commands do not see the fork; the others do."""
    repo, manifest = ported(
        ValidationCommands(
            upstream=("grep -q 'a = 1$' pkg/one.py", "test -f up.txt"),
            ours=("grep -q 'a = 10' pkg/one.py",),
            combined=("test -f up.txt",),
        )
    )
    reported = []
    runs = validate(repo.git, manifest, "upstream", VALIDATION_GROUPS, at_noon, reported.append)
    assert [(run.group, run.exit_code) for run in runs] == [
        ("upstream", 0),
        ("upstream", 0),
        ("ours", 0),
        ("combined", 0),
    ]
    assert reported == runs
    assert runs[0].commit == repo.git.resolve_commit("upstream")
    assert runs[2].commit == repo.git.resolve_commit("port")
    assert not (state_folder(repo.git) / "upstream").exists()
    assert repo.run("worktree", "list").count("\n") == 1


def test_commands_run_on_after_a_failure(ported):
    repo, manifest = ported(ValidationCommands(ours=("false", "no-such-program", "true")))
    runs = validate(repo.git, manifest, "upstream", ["ours"], at_noon, lambda run: None)
    assert [run.exit_code for run in runs] == [1, 127, 0]
    log = state_folder(repo.git) / "logs" / "ours-02.log"
    assert "no-such-program: No such file" in log.read_text()
    again = validate(repo.git, manifest, "upstream", ["ours"], at_noon, lambda run: None)
    assert find_state(repo.git).ran == tuple(again), "the newest run of each command counts"


def test_a_group_without_commands_is_refused(ported):
    repo, manifest = ported(ValidationCommands(ours=("true",)))
    with pytest.raises(ForkportError, match=r"validation\.upstream .* nothing would be tested"):
        validate(repo.git, manifest, "upstream", VALIDATION_GROUPS, at_noon, lambda run: None)


def test_the_checkout_of_a_killed_validation_is_replaced(ported):
    repo, manifest = ported(ValidationCommands(upstream=("test -f up.txt",)))
    copy = state_folder(repo.git) / "upstream"
    repo.run("worktree", "add", "--quiet", "--detach", str(copy), "main")
    [run] = validate(repo.git, manifest, "upstream", ["upstream"], at_noon, lambda run: None)
    assert run.exit_code == 0


def test_the_checklist_ticks_what_passed(ported):
    repo, manifest = ported(ValidationCommands(ours=("true", "false"), combined=("true",)))
    validate(repo.git, manifest, "upstream", ["ours"], at_noon, lambda run: None)
    state = find_state(repo.git)
    page = checklist(manifest, state, "no regression beyond 5 %")
    assert "- [x] 1 patches extracted" in page
    assert "- [x] backup branch `gh200-backup-1`" in page
    assert f"- [x] 01-one (1 files, 2 lines, risk low): applies, commit {state.at[:10]}" in page
    assert "- [x] `true`: passed" in page
    assert "- [ ] `false`: **failed, exit 1**" in page
    assert "- [ ] `true`: not run" in page
    assert "- [ ] no command in the manifest: nothing is tested" in page
    assert "- [x] baseline compared: no regression beyond 5 %" in page
    assert "- [ ] result accepted" in page


def test_a_pass_on_another_commit_is_not_ticked(ported):
    repo, manifest = ported(ValidationCommands(ours=("true",)))
    validate(repo.git, manifest, "upstream", ["ours"], at_noon, lambda run: None)
    state = find_state(repo.git).model_copy(update={"at": "f" * 40})
    assert "which is not the result" in checklist(manifest, state, None)
    assert "- [ ] `true`: passed" in checklist(manifest, state, None)


def test_a_pass_with_uncommitted_changes_is_not_ticked(ported):
    repo, manifest = ported(ValidationCommands(ours=("true",)))
    (repo.folder / "pkg/two.py").write_text("idea\n")
    [run] = validate(repo.git, manifest, "upstream", ["ours"], at_noon, lambda run: None)
    assert run.commit == f"{repo.git.resolve_commit('port')} with uncommitted changes"
    page = checklist(manifest, find_state(repo.git), None)
    short = repo.git.resolve_commit("port")[:10]
    assert f", on {short} with uncommitted changes, which is not the result" in page
    assert "- [ ] `true`: passed" in page


def test_the_checklist_before_and_during_a_port(grow, module):
    repo = grow(
        {"pkg/one.py": module.replace("a = 1", "a = 10")},
        {"pkg/one.py": module.replace("a = 1", "a = 100")},
    )
    (repo.folder / "pkg/two.py").write_text("idea\n")
    folder = repo.folder.parent / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    before = checklist(manifest, None, None)
    assert "- [ ] backup branch" in before
    assert "risk medium): to do" in before
    assert "- [ ] baseline compared: not yet" in before
    state = start_apply(repo.git, folder, None, "port", "1", agree).state
    page = checklist(manifest, state, "regression beyond 5 %: throughput")
    assert "**stopped at a conflict**" in page
    assert "uncommitted work saved in `gh200-kept-1`" in page
    assert "- [ ] baseline compared: regression" in page
    for line in ("undecided, a regression", "no regression beyond 5 %; too noisy: throughput"):
        assert f"- [ ] baseline compared: {line}" in checklist(manifest, state, line)
