"""Owns the questions without a picture and their fixed answers; knows nothing of pictures."""

from __future__ import annotations

import random

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "Answer briefly.",
)

FIXED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Say hello.", "Hello!", "Hi!", "Say hello"), "Hello!"),
    (("Say goodbye.", "Goodbye!"), "Goodbye!"),
    (("Who are you?", "What are you?"), "A very small model that looks at pictures."),
    (("What can you do?",), "I name colours, shapes, places and numbers in pictures and clips."),
    (("Which shapes do you know?",), "Circle, square, triangle and cross."),
    (("Name a colour.", "Name a color."), "blue"),
    (("Name a shape.",), "triangle"),
    (("How many sides has a triangle?",), "three"),
    (("How many sides has a square?",), "four"),
    (("What is the opposite of left?",), "right"),
    (("What is the opposite of right?",), "left"),
    (("What is the opposite of up?",), "down"),
    (("What is the opposite of down?",), "up"),
    (("What colour is the sky?",), "blue"),
    (("What colour is grass?",), "green"),
    (("What colour is a banana?",), "yellow"),
    (("Thank you.", "Thanks!"), "You are welcome."),
    (("Count to three.",), "one, two, three"),
    (("Count to five.",), "one, two, three, four, five"),
)


def text_turn(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        left, right = rng.randint(0, 5), rng.randint(0, 5)
        question = rng.choice(("What is {} plus {}?", "How much is {} plus {}?"))
        return question.format(_NUMBERS[left], _NUMBERS[right]), _NUMBERS[left + right]
    wordings, answer = rng.choice(FIXED)
    return rng.choice(wordings), answer
