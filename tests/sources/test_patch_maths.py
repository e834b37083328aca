"""The mathematics of the patches, in an environment that has torch.

The checks are in torch_checks.py. They run once, in an interpreter of their own (torch_env.py makes
its environment when it is missing), and each of their functions is a test here.
"""

import ast
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

from tests.sources import torch_env, wheels

HERE = Path(__file__).parent
CHECKS = HERE / "torch_checks.py"
REPO = HERE.parents[1]

NAMES = [
    node.name
    for node in ast.parse(CHECKS.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run all checks; for each function the words of its failures, empty where a case passed."""
    wheels.fetch_all()
    report = tmp_path_factory.mktemp("torch") / "report.xml"
    lib = REPO / "files/opt/dsv4/lib"
    done = subprocess.run(
        [
            *(torch_env.python(), "-m", "pytest", "--quiet", "--noconftest", f"--rootdir={REPO}"),
            *("-p", "no:cacheprovider", "-o", "filterwarnings=error", f"--junitxml={report}"),
            str(CHECKS),
        ],
        check=False,
        cwd=REPO,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{REPO}:{lib}",
            "PYTHONDONTWRITEBYTECODE": "1",
            # Others work on this machine too, and the tensors are small
            "OMP_NUM_THREADS": "2",
        },
    )
    assert report.is_file(), done.stdout + done.stderr
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        words = [
            f"{case.get('name')}: {problem.get('message')}\n{problem.text}"
            for problem in case
            if problem.tag in {"failure", "error", "skipped"}
        ]
        found[str(case.get("name")).partition("[")[0]].append("\n".join(words))
    return dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, outcomes: dict[str, list[str]]) -> None:
    """Every case of the check was run, and passed."""
    assert name in outcomes, f"did not run; there were {sorted(outcomes)}"
    assert [words for words in outcomes[name] if words] == []
