"""Sokoban: the rules by hand, the generator's promises, and the exact player against a plain breadth-first search."""

import time
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

import ragen_envs  # noqa: F401  registers the worlds
from ragen_envs.levels import canonical, load
from ragen_envs.sokoban import Sokoban, generate
from ragen_envs.solvers import sokoban_path

CODES = {symbol: code for code, symbol in enumerate("# .*$@+")}
NAMES = ("Up", "Down", "Left", "Right")
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def tiles(rows):
    return np.array([[CODES[symbol] for symbol in row] for row in rows])


def fewest(board):
    """The fewest moves that solve a board, by breadth-first search over single moves; None when none do."""
    cells = {(int(r), int(c)): int(board[r, c]) for r, c in np.argwhere(board > 0)}
    targets = frozenset(cell for cell, code in cells.items() if code in (2, 3, 6))
    start = (next(cell for cell, code in cells.items() if code > 4), frozenset(cell for cell, code in cells.items() if code in (3, 4)))
    ring, seen, moves = [start], {start}, 0
    while ring:
        if any(boxes == targets for _, boxes in ring):
            return moves
        following = []
        for (r, c), boxes in ring:
            for down, right in STEPS:
                ahead, far = (r + down, c + right), (r + 2 * down, c + 2 * right)
                if ahead not in cells or (ahead in boxes and (far not in cells or far in boxes)):
                    continue
                state = (ahead, boxes ^ {ahead, far} if ahead in boxes else boxes)
                if state not in seen:
                    seen.add(state)
                    following.append(state)
        ring, moves = following, moves + 1
    return None


def play(level, *turns, **settings):
    """(per turn: reward, terminated, truncated, info) of an env that plays `level`."""
    env = Sokoban(levels=[level], **settings)
    env.reset(seed=0)
    return [env.step(turn)[1:] for turn in turns]


# -- rules -----------------------------------------------------------------------------------------------------------------

ROOM = "#######\n#     #\n#  @  #\n#    $#\n#    .#\n#######"


@pytest.mark.parametrize(("move", "step"), list(zip(NAMES, STEPS, strict=True)))
def test_moves_go_where_their_names_say(move, step):
    env = Sokoban(levels=[ROOM])
    _, info = env.reset(seed=0)
    assert info["actions"] == list(NAMES) and ", ".join(NAMES) in info["rules"]
    assert np.argwhere(np.array(info["frames"][0]) == 5).tolist() == [[2, 3]]
    info = env.step(move)[4]
    assert np.argwhere(np.array(info["frames"][0]) == 5).tolist() == [[2 + step[0], 3 + step[1]]]


#                        level                                        turn                    reward  solved
BY_HAND = {
    "one push": ("#####\n#@$.#\n#####", "Right", 10.9, True),
    "three moves": ("#######\n#@ $ .#\n#######", "Right || Right || Right", 10.7, True),
    "more than needed: the rest is not played": ("#####\n#@$.#\n#####", "Right || Left", 10.9, True),
    "into the wall": ("#####\n#@$.#\n#####", "Up || Left", -0.2, False),
    "a stuck box": ("######\n#.@$ #\n######", "Right || Right || Right", -0.3, False),
    "two boxes in line": ("#######\n#@$$..#\n#######", "Right", -0.1, False),
    "onto a target and off": ("#######\n#@$. $#\n#    .#\n#######", "Right || Right", 0.8 - 1.0, False),
    "one of two home": ("########\n#@$. $.#\n#   ####\n########", "Right", 0.9, False),
    "from target to target": ("#######\n#@*.$ #\n#     #\n#######", "Right", -0.1, False),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_rewards_by_hand(case):
    level, turn, reward, solved = BY_HAND[case]
    ((got, terminated, truncated, info),) = play(level, turn)
    assert got == pytest.approx(reward, abs=1e-6)
    assert (terminated, truncated, info["success"]) == (solved, False, solved)


@pytest.mark.parametrize(
    "level", ["#####\n#@ $#\n#  .#\n#####", "######\n#.@$##\n######", "#######\n#@$$..#\n#######", "######\n#@$*.#\n######"]
)
def test_what_cannot_move_stays_and_the_move_still_costs(level):
    env = Sokoban(levels=[level])
    before, info = env.reset(seed=0)
    stuck = "Left" if "@ $" in level else "Right"
    after, reward, _, _, info = env.step(stuck)
    assert (after, info["moves"], info["valid"], info["effective"], info["left"]) == (before, [stuck], True, False, 9)
    assert reward == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("moves", range(1, 11))
def test_one_box_solved_in_n_moves_returns_11_minus_a_tenth_of_n(moves):
    corridor = f"#{'#' * (moves + 2)}#\n#@${' ' * (moves - 1)}.#\n#{'#' * (moves + 2)}#"
    turns = [" || ".join(["Right"] * min(5, moves - done)) for done in range(0, moves, 5)]
    played = play(corridor, *turns)
    assert sum(reward for reward, *_ in played) == pytest.approx(11 - 0.1 * moves, abs=1e-6)
    assert played[-1][1:3] == (True, False)  # at 10 moves too: solved on the very last move is solved, not cut off


def test_a_box_on_its_target_at_the_start_earns_nothing_on_the_first_move():
    level = "#######\n#@ * $#\n#    .#\n#######"
    assert play(level, "Down")[0][0] == pytest.approx(-0.1, abs=1e-6)
    # ... pushing it off costs the point, and solving pays 1 + 10 once.
    (off, _, _, info), *_ = play(level, "Right || Right")
    assert off == pytest.approx(-1.2, abs=1e-6) and not info["success"]
    (won, terminated, _, _), *_ = play("#######\n#  *  #\n#@$.  #\n#######", "Right")
    assert won == pytest.approx(-0.1 + 1 + 10, abs=1e-6) and terminated


@pytest.mark.parametrize("budget", [{"moves_per_episode": 3}, {"turns_per_episode": 1, "moves_per_turn": 3}])
def test_running_out_is_not_success(budget):
    corridor = "#######\n#@ $ .#\n#######"
    ((reward, terminated, truncated, info),) = play(corridor, "Left || Left || Left", **budget)
    assert reward == pytest.approx(-0.3, abs=1e-6)
    assert (terminated, truncated, info["success"]) == (False, True, False)
    ((reward, terminated, truncated, info),) = play(corridor, "Right || Right || Right", **budget)
    assert reward == pytest.approx(10.7, abs=1e-6)
    assert (terminated, truncated, info["success"]) == (True, False, True)


def test_the_coordinate_view_lists_what_is_there_in_ragens_order():
    env = Sokoban(levels=["########\n#+$*.$ #\n########"], view="coord")
    assert env.reset(seed=0)[0].splitlines() == [
        "Board size: 3 rows x 8 columns (zero-indexed).",
        "Targets: (1, 4)",
        "Boxes: (1, 2), (1, 5)",
        "Boxes on target: (1, 3)",
        "Player on target: (1, 1)",
    ]
    env = Sokoban(levels=[ROOM], view="grid_coord")
    text = env.reset(seed=0)[0]
    assert text.startswith("Coordinates:\nBoard size: 6 rows x 7 columns") and "Player: (2, 3)\nGrid Map:\n# # # # # # #\n# _ _ _" in text


def test_levels_and_the_level_option():
    env = Sokoban(size=(6, 7))
    assert env.reset(seed=3, options={"level": ROOM.replace(" ", "-")})[0].splitlines()[2] == "# _ _ P _ _ #"
    assert env.reset(seed=3)[0] == Sokoban(size=(6, 7)).reset(seed=3)[0]
    wide = "########\n#@$.   #\n########"
    refused = {"#####\n#@* #\n#####": "solved already", f"{ROOM}\n\n{ROOM}": "not of 2", wide: "3x8, larger than 6x7"}
    for level, reason in {**refused, "S": "unknown symbol", "": "no levels"}.items():
        with pytest.raises(ValueError, match=reason):
            env.reset(seed=3, options={"level": level})
    with pytest.raises(ValueError, match="solved already"):
        Sokoban(levels=["#####\n#@* #\n#####"]).reset(seed=0)
    with pytest.raises(ValueError, match="either levels or split='val'"):
        Sokoban(levels="ragen/simple", split="val")
    with pytest.raises(ValueError, match="unknown split 'dev'; known: train, val, test"):
        Sokoban(split="dev")
    with pytest.raises(TypeError, match="boxs"):
        gym.make("ragen/Sokoban-v0", boxs=2)


# -- the generator ---------------------------------------------------------------------------------------------------------

CONFIGS = {  # name -> (size, boxes, search_depth, split, seeds)
    "smallest": ((3, 5), 1, 300, None, 1000),
    "smallest square": ((5, 5), 1, 300, "train", 1000),
    "default": ((6, 6), 1, 300, "train", 1000),
    "larger": ((8, 8), 2, 10, "train", 150),
    "oblong": ((5, 9), 2, 60, "val", 60),
    "four boxes": ((10, 10), 4, 300, "train", 4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_generated_board_is_sound(name):
    size, boxes, depth, split, seeds = CONFIGS[name]
    for seed in range(seeds):
        started = time.process_time()
        rows = generate(seed, size, boxes, depth, split)
        assert time.process_time() - started < 1
        assert (len(rows), len(rows[0])) == size
        count = Counter("".join(rows))
        assert count["@"] + count["+"] == 1
        assert count["$"] == boxes == count["."] + count["+"] and not count["*"]  # every box off target: not solved
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        for r, row in enumerate(rows):
            for c, symbol in enumerate(row):
                if symbol == "$":  # no box is dead in a corner
                    assert not ("#" in rows[r - 1][c] + rows[r + 1][c] and "#" in row[c - 1] + row[c + 1])
        if boxes < 4:
            assert fewest(tiles(rows)) is not None
        else:
            assert sokoban_path(tiles(rows)) is not None


IMPOSSIBLE = [((3, 3), 5), ((3, 3), 1), ((4, 4), 1), ((2, 9), 1), ((5, 5), 4), ((3, 10), 3), ((6, 6), 7), ((7, 7), 8), ((6, 6), 0)]


@pytest.mark.parametrize(("size", "boxes"), IMPOSSIBLE)
@pytest.mark.parametrize("split", ["train", "val"])
def test_impossible_boards_are_a_quick_error(size, boxes, split):
    started = time.process_time()
    with pytest.raises(ValueError, match="box"):
        Sokoban(size=size, boxes=boxes, split=split).reset(seed=0)
    assert time.process_time() - started < 1


def test_a_split_without_boards_is_a_quick_error_that_says_so():
    started = time.process_time()
    with pytest.raises(ValueError, match="split 'val' among 1000: .*split=None takes all"):
        for split in ("train", "val"):  # there is one 3x5 board
            Sokoban(size=(3, 5), split=split).reset(seed=0)
    assert time.process_time() - started < 1


def test_levels_differ_between_seeds_and_between_resets():
    env = Sokoban()
    assert len({env.reset(seed=seed)[0] for seed in range(50)}) >= 45
    first = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    assert len(set(first)) == 3 and [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]] == first


PACK_LIKE = {"ragen/simple": ((6, 6), 1, 300), "ragen/large": ((8, 8), 2, 10)}


@pytest.mark.parametrize("pack", PACK_LIKE)
def test_the_boards_are_distributed_like_ragens(pack):
    """The fewest moves and the floor of 1000 boards against the pack: medians equal, the rest within four standard errors."""
    theirs = [tiles(level.rows) for level in load(pack)]
    ours = [tiles(generate(seed, *PACK_LIKE[pack])) for seed in range(1000)]
    moves = [np.array([len(sokoban_path(board) or ()) for board in boards]) for boards in (theirs, ours)]
    floor = [np.array([(board > 0).sum() for board in boards]) for boards in (theirs, ours)]
    assert np.median(moves[0]) == np.median(moves[1]) and np.median(floor[0]) == np.median(floor[1])
    for measure in (moves, floor, [m <= 2 for m in moves], [m <= 5 for m in moves]):
        error = sum(np.var(sample) / len(sample) for sample in measure) ** 0.5
        assert abs(np.mean(measure[0]) - np.mean(measure[1])) < 4 * error
    assert np.mean(moves[1] <= 10) > 0.98


def test_ragens_validation_boards_would_be_met_in_training_were_it_not_for_the_splits():
    held_out = {canonical(level.rows) for level in load("ragen/simple")}
    met = [canonical(generate(seed, (6, 6), 1)) in held_out for seed in range(300)]
    assert np.mean(met) > 0.2  # a split by seed would train on these
    assert not any(canonical(generate(seed, (6, 6), 1, 300, "train")) in held_out for seed in range(300))


# -- the exact player ------------------------------------------------------------------------------------------------------


def boards():
    """100 boards: RAGEN's packs, generated ones, and some with boxes and the player anywhere (many of those have no solution)."""
    yield from (tiles(level.rows) for pack in PACK_LIKE for level in load(pack)[:25])
    yield from (tiles(generate(seed, (6, 6), 2)) for seed in range(20))
    rng = np.random.default_rng(0)
    for _ in range(30):
        board = np.where(rng.random((7, 7)) < 0.75, 1, 0)
        board[[0, -1]] = board[:, [0, -1]] = 0
        free = rng.permutation(np.flatnonzero(board))
        board.flat[free[:5]] = [2, 2, 4, 4, 5]
        yield board


def test_solutions_are_shortest_and_solve_when_replayed():
    answers = Counter()
    for board in boards():
        path, least = sokoban_path(board), fewest(board)
        answers[path is None] += 1
        if path is None:
            assert least is None
            continue
        assert len(path) == least
        assert sokoban_path(board, least) == path and sokoban_path(board, len(path) - 1) is None
        level = "\n".join("".join("# .*$@+"[code] for code in row) for row in board)
        env = Sokoban(levels=[level], moves_per_turn=len(path), moves_per_episode=len(path))
        env.reset(seed=0)
        _, _, terminated, _, info = env.step("||".join(NAMES[move] for move in path))
        assert terminated and info["moves"] == [NAMES[move] for move in path]
    assert sum(answers.values()) == 100 and answers[True] >= 10  # both kinds were met


def test_a_solved_board_needs_no_moves_and_a_dead_one_has_no_solution():
    assert sokoban_path(tiles(["#####", "#@* #", "#####"])) == []
    assert sokoban_path(tiles(["#####", "#$@.#", "#####"])) is None
    assert sokoban_path([[0, 0, 0, 0, 0], [0, 5, 4, 2, 0], [0, 0, 0, 0, 0]]) == [3]


@pytest.mark.parametrize("env_id", ["ragen/Sokoban-v0", "ragen/LargerSokoban-v0"])
def test_following_the_hints_solves_and_one_wrong_move_is_planned_around(env_id):
    env = gym.make(env_id, hints=True, moves_per_episode=30, turns_per_episode=30)
    for seed in range(20):
        _, info = env.reset(seed=seed)
        plan = list(info["plan"])
        assert len(plan) == fewest(np.array(info["frames"][-1]))
        _, _, terminated, _, info = env.step(plan[0])
        assert info["plan"] == plan[1:]  # the whole of the rest, kept while it is followed
        while not terminated:
            best = fewest(np.array(info["frames"][-1]))
            assert best is None or len(info["plan"]) == best or best > info["left"]
            if best is None:
                assert info["plan"][0] in NAMES
                break
            move = NAMES[(NAMES.index(info["plan"][0]) + 1) % 4] if info["left"] == 28 else info["plan"][0]
            _, _, terminated, _, info = env.step(move)
        assert terminated == info["success"] and (not terminated or info["plan"] == [])


def test_a_dead_board_still_gets_a_legal_move_every_turn():
    env = Sokoban(levels=["######\n#@$. #\n######"], hints=True)
    _, info = env.reset(seed=0)
    assert info["plan"] == ["Right"]
    env = Sokoban(levels=["######\n#$@. #\n######"], hints=True)
    _, info = env.reset(seed=0)
    for _ in range(5):
        assert info["plan"][0] in NAMES
        info = env.step(info["plan"][0])[4]


def test_the_exact_player_knows_the_budgets():
    corridor = "#########\n#@ $   .#\n#########"  # five moves
    enough = Sokoban(levels=[corridor], hints=True, moves_per_episode=5)
    few_moves = Sokoban(levels=[corridor], hints=True, moves_per_episode=4)
    few_turns = Sokoban(levels=[corridor], hints=True, moves_per_turn=2, turns_per_episode=2)
    assert [env.reset(seed=0)[1]["plan"] for env in (enough, few_moves, few_turns)] == [["Right"] * 5, ["Up"], ["Up"]]


def test_a_limit_stays_reached():  # E01: the test is >=, not ==
    env = gym.make("ragen/Sokoban-v0", turns_per_episode=1, moves_per_episode=50, moves_per_turn=1)
    env.reset(seed=3)
    assert [env.step("nothing")[3] for _ in range(3)] == [True, True, True]
