"""Owns the kinds of question, their wordings and their true answers; knows nothing of tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo import scenes
from demo.pictures import DIGITS, Mark, Picture
from demo.small_talk import SYSTEM_LINES, text_turn

Turn = tuple[str, str]

NUMBER_WORDS = ("zero", "one", "two", "three")
MOST_COUNTED = 3
ORDINALS = ("first", "second", "third")
WAYS = ("left", "right", "up", "down")


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: what is shown in its first turn, then questions and their answers.

    `clip` holds the frames of a video (with `fps`), `pictures` still images; never both.
    """

    kind: str
    turns: tuple[Turn, ...]
    pictures: tuple[Picture, ...] = ()
    clip: tuple[Picture, ...] = ()
    fps: float = 2.0
    system: str | None = None


def _ask(rng: random.Random, answer: str, *wordings: str) -> Turn:
    return rng.choice(wordings), answer


def _unique(values: list[str], rng: random.Random) -> str | None:
    once = [value for value, count in Counter(values).items() if count == 1]
    return rng.choice(once) if once else None


def colour_turn(picture: Picture, rng: random.Random) -> Turn | None:
    """Of a single shape."""
    if len(picture.marks) != 1:
        return None
    shape = picture.marks[0].what
    wordings = (
        f"What colour is the {shape}?",
        f"What color is the {shape}?",
        f"Which colour does the {shape} have?",
        "What colour is it?",
        "What colour is the shape?",
        "What color is the shape?",
    )
    return _ask(rng, picture.marks[0].colour, *wordings)


def shape_turn(picture: Picture, rng: random.Random) -> Turn | None:
    colour = _unique([mark.colour for mark in picture.marks], rng)
    if colour is None:
        return None
    answer = next(mark.what for mark in picture.marks if mark.colour == colour)
    wordings = [f"What shape is the {colour} one?", f"Which shape is {colour}?"]
    if len(picture.marks) == 1:
        wordings += ["What shape is it?", "What shape is this?", "Which shape do you see?"]
    return _ask(rng, answer, *wordings)


def count_turn(picture: Picture, rng: random.Random) -> Turn | None:
    wordings = ("How many shapes are there?", "Count the shapes.", "How many shapes do you see?")
    return _ask(rng, NUMBER_WORDS[len(picture.marks)], *wordings)


def _coloured_once(picture: Picture, rng: random.Random) -> Mark | None:
    colour = _unique([mark.colour for mark in picture.marks], rng)
    return next((mark for mark in picture.marks if mark.colour == colour), None)


def position_turn(picture: Picture, rng: random.Random) -> Turn | None:
    mark = _coloured_once(picture, rng)
    if mark is None or mark.zone is None:
        return None
    wordings = [f"Where is the {mark.name}?", f"In which part is the {mark.name}?"]
    if len(picture.marks) == 1:
        wordings += ["Where is it?", "Where is the shape?"]
    return _ask(rng, mark.zone, *wordings)


def place_turn(picture: Picture, rng: random.Random) -> Turn | None:
    mark = rng.choice(picture.marks)
    if mark.zone is None:
        return None
    wordings = (f"What is in the {mark.zone}?", f"What do you see in the {mark.zone}?")
    return _ask(rng, with_article(mark), *wordings)


def exists_turn(picture: Picture, rng: random.Random) -> Turn | None:
    present = {mark.name for mark in picture.marks}
    asks_present = rng.random() < 0.5
    name = rng.choice(sorted(present)) if asks_present else _absent_name(picture.marks, rng)
    wordings = (f"Is there {_article(name)}?", f"Do you see {_article(name)}?")
    return _ask(rng, "yes" if name in present else "no", *wordings)


def _absent_name(marks: tuple[Mark, ...], rng: random.Random) -> str:
    """Half of the time a near miss: the colour or the shape of something that is there."""
    while True:
        colour, shape = scenes.random_name(rng)
        draw = rng.random()
        if draw < 0.3:
            colour = rng.choice(marks).colour
        elif draw < 0.6:
            shape = rng.choice(marks).what
        name = f"{colour} {shape}"
        if all(mark.name != name for mark in marks):
            return name


def describe_turn(picture: Picture, rng: random.Random) -> Turn | None:
    if len(picture.marks) > 3:
        return None
    names = [with_article(mark) for mark in picture.marks]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    answer = listed[0].upper() + listed[1:] + "."
    return _ask(rng, answer, "Describe the picture.", "What is in the picture?", "What do you see?")


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def with_article(mark: Mark) -> str:
    return _article(mark.name)


TurnMaker = Callable[[Picture, random.Random], Turn | None]

PICTURE_TURNS: dict[str, TurnMaker] = {
    "colour": colour_turn,
    "shape": shape_turn,
    "count": count_turn,
    "position": position_turn,
    "place": place_turn,
    "exists": exists_turn,
    "describe": describe_turn,
}


def picture_example(
    kind: str, size: scenes.Size, most_marks: int, turn_count: int, rng: random.Random
) -> Example:
    """A conversation about one picture whose first question is of the given kind."""
    while True:
        picture = _scene(kind, size, most_marks, rng)
        turn = PICTURE_TURNS[kind](picture, rng)
        if turn is not None:
            break
    turns = [turn]
    others = rng.sample(list(PICTURE_TURNS), k=len(PICTURE_TURNS))
    for other in others:
        extra = PICTURE_TURNS[other](picture, rng) if len(turns) < turn_count else None
        if extra is not None and other != kind:
            turns.append(extra)
    return Example(kind, tuple(turns), pictures=(picture,), system=_maybe_system(rng))


def _scene(kind: str, size: scenes.Size, most_marks: int, rng: random.Random) -> Picture:
    if kind == "count":
        return scenes.crowd(size, rng.randint(1, MOST_COUNTED), rng)
    count = 1 if kind == "colour" else rng.randint(1, most_marks)
    if count == 1 and kind not in ("position", "place"):
        return scenes.single(size, rng)
    return scenes.several(size, count, rng)


def _maybe_system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_LINES) if rng.random() < 0.15 else None


def number_example(size: scenes.Size, turn_count: int, rng: random.Random) -> Example:
    length = rng.randint(1, 2)
    first = rng.choice(DIGITS[1:] if length > 1 else DIGITS)
    digits = first + "".join(rng.choice(DIGITS) for _ in range(length - 1))
    picture = scenes.number(size, digits, rng)
    wordings = ("What number is this?", "Which number do you see?", "Read the number.")
    turns = [_ask(rng, digits, *wordings)]
    if turn_count > 1:
        colours = ("What colour is the number?", "What color is the number?")
        turns.append(_ask(rng, picture.marks[0].colour, *colours))
    return Example("number", tuple(turns), pictures=(picture,), system=_maybe_system(rng))


def which_turn(pictures: tuple[Picture, Picture], rng: random.Random) -> Turn | None:
    """Something in a colour that only one of the two pictures has."""
    index = rng.randrange(2)
    colours = {mark.colour for mark in pictures[1 - index].marks}
    wanted = [mark.name for mark in pictures[index].marks if mark.colour not in colours]
    if not wanted:
        return None
    name = rng.choice(wanted)
    wordings = (f"Which picture has the {name}?", f"In which picture is the {name}?")
    return _ask(rng, f"the {ORDINALS[index]}", *wordings)


def of_two_turn(pictures: tuple[Picture, Picture], rng: random.Random) -> Turn | None:
    index = rng.randrange(2)
    if len(pictures[index].marks) > 1:
        return None
    mark, place = pictures[index].marks[0], f"the {ORDINALS[index]} picture"
    choices = (
        (f"What colour is the shape in {place}?", mark.colour),
        (f"What shape is in {place}?", mark.what),
        (f"What is in {place}?", with_article(mark)),
    )
    return rng.choice(choices)


def two_pictures_example(
    kind: str, sizes: tuple[scenes.Size, scenes.Size], turn_count: int, rng: random.Random
) -> Example:
    """Two pictures with a shape each."""
    makers = {"of two pictures": of_two_turn, "which picture": which_turn}
    first = None
    while first is None:
        pictures = (scenes.single(sizes[0], rng), scenes.single(sizes[1], rng))
        first = makers[kind](pictures, rng)
    turns = [first]
    for _ in range(turn_count - 1):
        extra = rng.choice((of_two_turn, which_turn))(pictures, rng)
        if extra is not None and extra not in turns:
            turns.append(extra)
    return Example(kind, tuple(turns), pictures=pictures, system=_maybe_system(rng))


def motion_example(size: scenes.Size, rng: random.Random) -> Example:
    way = rng.choice(WAYS)
    clip = scenes.moving(size, way, rng.randint(2, 8), rng)
    wordings = ("Which way does it move?", "In which direction does the shape move?")
    turns = [_ask(rng, way, *wordings)]
    if rng.random() < 0.3:
        turns.append(_ask(rng, with_article(clip[0].marks[0]), "What moves?"))
    return Example("motion", tuple(turns), clip=clip, fps=rng.choice((1.0, 2.0, 4.0)))


def order_example(size: scenes.Size, rng: random.Random) -> Example:
    colours = rng.sample(scenes.COLOUR_NAMES, rng.choice((2, 3)))
    clip = scenes.changing(size, colours, rng)
    index = rng.randrange(len(colours))
    place = "last" if index == len(colours) - 1 and rng.random() < 0.5 else ORDINALS[index]
    turn = _ask(rng, colours[index], f"Which colour comes {place}?", f"What colour is {place}?")
    return Example("order", (turn,), clip=clip, fps=rng.choice((1.0, 2.0, 4.0)))


def text_example(rng: random.Random) -> Example:
    return Example("text only", (text_turn(rng),), system=_maybe_system(rng))


KINDS = (*PICTURE_TURNS, "number", "which picture", "of two pictures", "motion", "order",
         "text only", "follow-up")  # fmt: skip


def make_example(
    kind: str,
    sizes: tuple[scenes.Size, scenes.Size],
    rng: random.Random,
    most_marks: int = 2,
    turn_count: int = 1,
) -> Example:
    """One example of a kind; `sizes` are (width, height), the second for a second picture."""
    first, _ = sizes
    if kind in PICTURE_TURNS:
        return picture_example(kind, first, most_marks, turn_count, rng)
    if kind in ("which picture", "of two pictures"):
        return two_pictures_example(kind, sizes, turn_count, rng)
    others: dict[str, Callable[[], Example]] = {
        "follow-up": lambda: _follow_up_example(first, most_marks, rng),
        "number": lambda: number_example(first, turn_count, rng),
        "motion": lambda: motion_example(first, rng),
        "order": lambda: order_example(first, rng),
        "text only": lambda: text_example(rng),
    }
    return others[kind]()


def _follow_up_example(size: scenes.Size, most_marks: int, rng: random.Random) -> Example:
    first = rng.choice(tuple(PICTURE_TURNS))
    return replace(picture_example(first, size, most_marks, 2, rng), kind="follow-up")
