"""Build git repositories for tests, including a long upstream history next to a fork."""

import os
import random
import subprocess
from pathlib import Path

from forkport.apply import start_apply
from forkport.extract import extract
from forkport.git import open_repository
from forkport.plan import make_plan

IDENTITY = {
    "GIT_AUTHOR_NAME": "Maker",
    "GIT_AUTHOR_EMAIL": "maker@example.org",
    "GIT_COMMITTER_NAME": "Maker",
    "GIT_COMMITTER_EMAIL": "maker@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


class Repo:
    """A new repository in a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **IDENTITY}
        folder.mkdir(parents=True, exist_ok=True)
        self.run("init", "--quiet", "--initial-branch=main", *options)
        self.git = open_repository(folder, self.environment)

    def run(self, *words: str, stdin: bytes = b"") -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr.decode())
        return done.stdout.decode()

    def commits(self, branch: str, steps, parent: str | None = None) -> None:
        """Add commits, given as (message, {path: content, or None to delete}), with one process."""
        stream = [f"feature done\nreset refs/heads/{branch}\n"]
        stream += [f"from {parent}\n\n"] if parent else []
        for message, files in steps:
            text = message.encode()
            who = "Maker <maker@example.org> 1700000000 +0000"
            stream.append(f"commit refs/heads/{branch}\ncommitter {who}\ndata {len(text)}\n")
            stream.append(message + "\n")
            for path, content in files.items():
                if content is None:
                    stream.append(f"D {path}\n")
                else:
                    data = content if isinstance(content, bytes) else content.encode()
                    stream += [f"M 100644 inline {path}\ndata {len(data)}\n", data, b"\n"]
        stream.append("done\n")
        raw = b"".join(part if isinstance(part, bytes) else part.encode() for part in stream)
        self.run("fast-import", "--quiet", "--force", stdin=raw)

    def show(self, name: str, path: str) -> str:
        return self.run("show", f"{name}:{path}")

    def files(self) -> dict[str, bytes]:
        """Return every file on disk except git's own."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(self.folder).parts
        }


class Files:
    """Python files as functions with lines; every line of the base is unique."""

    def __init__(self, num_files: int, num_functions: int, num_lines: int) -> None:
        self.files = {
            f"pkg/part{f:02d}.py": {
                f"work_{f}_{g}": [f"    v{f}_{g}_{i} = {i}" for i in range(num_lines)]
                for g in range(num_functions)
            }
            for f in range(num_files)
        }

    def copy(self) -> "Files":
        new = Files(0, 0, 0)
        new.files = {path: {n: list(b) for n, b in fs.items()} for path, fs in self.files.items()}
        return new

    def text(self, path: str) -> str:
        head = f'"""The file that began as {min(self.files[path], default="")}."""\n'
        bodies = ("\n".join([f"def {n}():", *b]) for n, b in self.files[path].items())
        return head + "".join(f"\n\n{body}\n" for body in bodies)

    def where(self, function: str) -> str:
        return next(path for path, functions in self.files.items() if function in functions)


class History:
    """A generated fork and upstream, and which lines of the base each of them changed."""

    def __init__(self, seed: int, num_commits: int) -> None:
        self.rng = random.Random(seed)
        self.base = Files(24, 6, 14)
        self.upstream = self.base.copy()
        self.fork = self.base.copy()
        self.changed_upstream: set[str] = set()
        self.changed_fork: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.moved: set[str] = set()
        self.reserved: set[str] = set()
        self.fork_files = self._edit_fork()
        self.steps = self._grow_upstream(num_commits)

    def _edit_fork(self) -> dict[str, str]:
        """Change seven files and add five."""
        files = {}
        for number in range(7):
            path = f"pkg/part{number:02d}.py"
            for name, body in self.fork.files[path].items():
                for line in self.rng.sample(range(len(body)), 2):
                    self.changed_fork.add(body[line].strip())
                    body[line] = f"{body[line]}  # the fork's"
                assert name in self.base.files[path]
            files[path] = self.fork.text(path)
        for number in range(5):
            files[f"pkg/extra/new{number}.py"] = f"ANSWER = {number}\n"
        return files

    def _grow_upstream(self, num_commits: int):
        steps = []
        for number in range(num_commits):
            kind = {20: "rename", 60: "move", 61: "move", 90: "rename", 120: "dissolve"}.get(
                number, "reorder" if number == 140 else "edit"
            )
            steps.append((f"{kind} {number}", getattr(self, f"_{kind}")(number)))
        return steps

    def _edit(self, number: int) -> dict[str, str | None]:
        """Change one line that is still as in the base, in any function."""
        while True:
            path = self.rng.choice(sorted(self.upstream.files))
            functions = self.upstream.files[path]
            if not functions:
                continue
            name = self.rng.choice(sorted(functions))
            line = self.rng.randrange(len(functions[name]))
            text = functions[name][line]
            if "#" not in text:
                break
        self.changed_upstream.add(text.strip())
        functions[name][line] = f"{text}  # upstream {number}"
        return {path: self.upstream.text(path)}

    def _rename(self, number: int) -> dict[str, str | None]:
        old = "pkg/part00.py" if number == 20 else "pkg/part01.py"
        new = old.replace("pkg/", "pkg/core/")
        self.renamed[old] = new
        self.upstream.files[new] = self.upstream.files.pop(old)
        return {old: None, new: self.upstream.text(new)}

    def _move(self, number: int) -> dict[str, str | None]:
        """Move a function that the fork changed to a file that it did not change."""
        name = "work_2_1" if number == 60 else "work_3_4"
        old, new = self.upstream.where(name), "pkg/part20.py"
        self.moved.add(name)
        self.upstream.files[new][name] = self.upstream.files[old].pop(name)
        return {old: self.upstream.text(old), new: self.upstream.text(new)}

    def _dissolve(self, number: int) -> dict[str, str | None]:
        """Delete a file and move its functions to two others."""
        old = "pkg/part04.py"
        functions = self.upstream.files.pop(old)
        for place, (name, body) in enumerate(functions.items()):
            self.moved.add(name)
            self.upstream.files[f"pkg/part{21 + place % 2}.py"][name] = body
        changed = ("pkg/part21.py", "pkg/part22.py")
        return {old: None, **{path: self.upstream.text(path) for path in changed}}

    def _reorder(self, number: int) -> dict[str, str | None]:
        path = "pkg/part05.py"
        functions = self.upstream.files[path]
        self.moved.add("work_5_0")
        functions["work_5_0"] = functions.pop("work_5_0")
        return {path: self.upstream.text(path)}

    def lines_changed_by_both(self) -> set[str]:
        """Return the lines of the base that both sides changed."""
        return self.changed_upstream & self.changed_fork

    def build(self, folder: Path) -> Repo:
        repo = Repo(folder)
        first = {path: self.base.text(path) for path in self.base.files}
        first["README.md"] = "\n".join(f"paragraph {i}" for i in range(30)) + "\n"
        repo.commits("main", [("base", first)])
        repo.commits("fork", [("the fork", self.fork_files)], parent="main")
        repo.commits("upstream", self.steps, parent="main")
        repo.run("checkout", "--quiet", "fork")
        return repo


def port_fork(repo):
    """Port the branch `fork` onto `upstream`, and check that the plan predicted the outcome."""
    folder = repo.folder.parent / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    plans = make_plan(repo.git, manifest, folder, "upstream")
    outcome = start_apply(repo.git, folder, None, "port", "1", lambda question: None)
    predicted = [plan.patch.name for plan in plans if plan.verdict == "conflicts"]
    stopped = outcome.state.stopped
    assert predicted[:1] == ([stopped.patch] if stopped else []), "the plan was wrong"
    return outcome
