"""The README keeps its word: its files are files, its commands run, and what it links to is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from ragen_agent import cli
from ragen_agent.policies import SolverPolicy
from ragen_agent.rollout import rollout

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FILES = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", README, re.S))
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
OWN = [command for command in COMMANDS if command.startswith("ragen train") and re.search(r" my_\w+:", command)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that holds the README's files, to work in."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_python_block_is_one_of_the_files():
    assert README.count("```python") == len(FILES) == 4


def test_the_world_is_used_as_shown(place):
    subprocess.run([sys.executable, "use_a_world.py"], check=True, capture_output=True)


def test_the_added_world_is_a_gymnasium_env_and_its_player_exact(place):
    check_env(gym.make("my_games:ragen/Treasure-v0").unwrapped, skip_render_check=True)
    episodes = rollout("my_games:ragen/Treasure-v0", SolverPolicy(), range(30))
    assert all(episode.success for episode in episodes)


@pytest.mark.parametrize("command", OWN)
def test_what_the_reader_adds_trains(place, command, capsys):
    assert cli.main([*shlex.split(command)[1:], "--threads", "1"]) == 0
    assert "held-out levels" in capsys.readouterr().out


def test_all_three_additions_are_trained():
    assert len(OWN) == 3


@pytest.mark.parametrize("command", [c for c in COMMANDS if "ragen " in c])
def test_every_command_has_known_verbs_and_flags(command):
    words = shlex.split(command[command.index("ragen ") :])
    settings = cli.VERBS[words[1]][0].__dataclass_fields__
    for word in words[2:]:
        if word.startswith("--") and word != "--help":
            assert word[2:].replace("-", "_") in settings, word


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
