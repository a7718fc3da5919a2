import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "launch.topology", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_it_prints_the_matrix_of_a_tree(tmp_path):
    (tmp_path / "class/net/eth7").mkdir(parents=True)
    (tmp_path / "class/net/eth7/type").write_text("1\n")
    done = run(f"--sysfs={tmp_path}")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"cpu:0": [["eth7"], []]})


def test_it_checks_a_matrix(tmp_path):
    file = tmp_path / "matrix.json"
    file.write_text('{"cpu:0": [["a"], ["b"]]}')
    assert json.loads(run(f"--topology={file}").stdout) == {"cpu:0": [["a"], ["b"]]}
    for wrong in ('{"cpu:0": 5}', str(tmp_path / "missing")):
        done = run(f"--topology={wrong}")
        assert done.returncode == 2
        assert done.stderr.startswith("python -m launch.topology: --topology=")
        assert "Traceback" not in done.stderr
