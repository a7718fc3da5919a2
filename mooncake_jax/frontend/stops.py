"""Stop strings, found across any cut of the text into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, holding back what may yet become a stop string.

    The stop that is complete first (of those, the longest) ends the text before it, so the result does not
    depend on how the text was cut. One Knuth-Morris-Pratt automaton per stop: a character costs O(stops).
    """

    def __init__(self, stops: Sequence[str]):
        """`stops` are non-empty. Raises ValueError otherwise."""
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now sure to belong to the answer; nothing more once `stopped`."""
        if self.stopped:
            return ""
        for i, character in enumerate(text):
            complete = self._advance(character)
            if complete:
                self.stopped = True
                whole, self._held = self._held + text[: i + 1], ""
                return whole[:-complete]
        whole = self._held + text
        hold = max(self._matched, default=0)
        split = len(whole) - hold
        self._held = whole[split:]
        return whole[:split]

    def flush(self) -> str:
        """The held-back text, which no stop completed: the answer ends here."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop that `character` completes, or 0."""
        longest = 0
        for j, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._matched[j]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[j] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return borders
