"""A long text of our own, the same every time: the log of a voyage, more than 3,000 tokens of it."""

from __future__ import annotations

NUM_DAYS = 92
_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_SEAS = ("calm", "moderate", "rough", "glassy", "choppy")
_SIGHTS = (
    "a pod of pilot whales",
    "an iceberg the shape of a chapel",
    "a drifting fishing net",
    "two albatrosses",
    "a green flash at sunset",
    "a merchant ship under full sail",
    "floating kelp and a turtle",
    "phosphorescent water around the keel",
    "the smoke of a distant volcano",
)
_WORK = (
    "patched the mainsail",
    "scrubbed the deck",
    "counted the water casks",
    "repaired the forward pump",
    "checked the chronometer against the moon",
    "baked bread from the last of the rye",
    "tarred the rigging",
)

QUESTIONS = (
    "What did the crew see on day 12?",
    "From where did the wind blow on day 40, and what did the crew do?",
    "How was the sea on day 77?",
)


def document() -> str:
    """One entry a day; every entry follows from the number of its day."""
    entries = [_entry(day) for day in range(1, NUM_DAYS + 1)]
    return "The log of the schooner Meridian.\n\n" + "\n".join(entries) + "\n"


def _entry(day: int) -> str:
    wind, sea = _WINDS[day * 5 % len(_WINDS)], _SEAS[day * day % len(_SEAS)]
    sight, work = _SIGHTS[day * 7 % len(_SIGHTS)], _WORK[day * 3 % len(_WORK)]
    return f"Day {day}. Wind from the {wind}, the sea {sea}. The crew {work} and saw {sight}."
