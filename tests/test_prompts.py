"""The answer in a reply: strict, linear, never raising; and the words around a world's words (field cases P*)."""

import time

import pytest

from ragen_agent.prompts import Prompt, answer_in

GOOD = "<think>t</think><answer>Up</answer>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (GOOD, "Up"),
        (GOOD + "<|im_end|>", "Up"),
        (" <think> a\nb </think>\n <answer> Up || Down </answer> \n", "Up || Down"),
        ("<think></think><answer>x</answer>", "x"),
        ("Up", ""),
        ("<answer>Up", ""),
        ("</answer>Up<answer>", ""),
        ("<think>t</think><answer></answer>", ""),
        ("<think>t</think><answer>  </answer>", ""),
        ("<answer>Up</answer>", ""),  # no thoughts while thinking is on
        ("<think>t<answer>Up</answer>", ""),
        ("<think>t</think><answer>Up</answer> and then", ""),
        ("so: " + GOOD, ""),
        ("<think>t</think> hm <answer>Up</answer>", ""),
        ("<think>a</think><think>b</think><answer>Up</answer>", ""),
        ("<think>t</think><answer>Up</answer><answer>Down</answer>", ""),
        ("<think><answer>Up</answer></think><answer>Up</answer>", ""),
        ("<answer>Up</answer><think>t</think>", ""),
        ("<think>t<think></think></think><answer>Up</answer>", ""),
        ("<Think>t</Think><Answer>Up</Answer>", ""),
        ("＜think＞t＜/think＞＜answer＞Up＜/answer＞", ""),
        (GOOD + "<|im_end|><|im_end|>", ""),
        (GOOD + "<|im_end|>\n<|im_start|>user\nWell done", ""),
        ("", ""),
        ("\x00\ud800", ""),
    ],
)
def test_the_form_is_strict(text, answer):
    assert answer_in(text) == answer


def test_without_thinking_the_answer_stands_alone():
    assert answer_in("<answer>Up</answer>", think=False) == "Up"
    assert answer_in(GOOD, think=False) == ""


def test_full_width_moves_pass_through_and_name_no_move():
    assert answer_in("<think></think><answer>Ｕｐ</answer>") == "Ｕｐ"  # the world decides that it is no move


@pytest.mark.parametrize("piece", ["<think>", "</answer>", "<answer></answer>", "<", " ", "<|im_end|>", "a||", "\n"])
def test_hostile_replies_take_linear_time(piece):
    def seconds(length):
        texts = [piece * (length // len(piece)), "<think>" + piece * (length // len(piece)) + "</think><answer>Up</answer>"]
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            for text in texts:
                answer_in(text)
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(800_000) < 0.5  # a quadratic scan of 800,000 characters takes minutes


INFO = {"left": 8, "allowed": 5, "valid": False}


def test_the_full_style_tells_reward_fault_state_and_both_budgets():
    text = Prompt().user(2, "# P #", INFO, -0.3)
    for piece in ("-0.3", "not valid", "Turn 2", "# P #", "8 actions left", "use 5", "<think>", "<answer>"):
        assert piece in text
    assert "not valid" not in Prompt().user(2, "# P #", {**INFO, "valid": True}, -0.3)
    assert "Reward" not in Prompt().user(1, "# P #", INFO)
    assert "<think>" not in Prompt(think=False).user(1, "# P #", INFO)


def test_the_brief_style_tells_the_state_and_the_moves_left():
    assert Prompt(style="brief").user(1, "# P #", INFO) == "# P #\n8 left"
    assert Prompt(style="brief").system("rules") == ""


def test_an_unknown_style_names_the_known():
    with pytest.raises(ValueError, match="full, brief"):
        Prompt(style="verbose")


@pytest.mark.parametrize("think", [True, False])
def test_the_teachers_reply_has_the_form(think):
    assert answer_in(Prompt(think=think).reply("Up Up", "Up || Up"), think) == "Up || Up"
