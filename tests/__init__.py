"""The tests of the project; `tests.parts` holds what several of them play with."""
