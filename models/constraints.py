"""Constrained beam search (Anderson, Fernando, Johnson, Gould 2017): captions that must contain given words; any model.

A constraint is a set of alternatives, each one word or several in a row; a caption satisfies it when it contains one
of them. The constraints of an image become a finite-state automaton. A state records which of them are satisfied and,
within a longer alternative, how much of it the last words match. The search keeps a beam for every state, so that a
caption on its way to a rare word is not crowded out by more probable ones that never get there.

Shapes: B images, S states, K beams per state, R = B*S*K rows, T caption tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.decoding import Beams, Captions, Decoder, Memories, Models, check_beams, search

Words = tuple[int, ...]
Constraint = Sequence[Words]  # its alternatives

MAX_STATES = 256  # eight constraints of single words; the beams of all states run at every step


@dataclass(frozen=True)
class ConstraintAutomaton:
    """The finite-state automaton of one image's constraints; state 0 is the start.

    num_satisfied: for each state, how many of the `count` constraints a caption in it satisfies; `num_required` of them
    must be. `steps[state]` maps the words that matter there to the next state; every other word leads to `rest[state]`.
    """

    count: int
    num_required: int
    num_satisfied: tuple[int, ...]
    steps: tuple[dict[int, int], ...]
    rest: tuple[int, ...]

    def follow(self, words: Sequence[int]) -> int:
        """The state that a caption's words lead to."""
        state = 0
        for word in words:
            state = self.steps[state].get(word, self.rest[state])
        return state


def build_automaton(
    constraints: Sequence[Constraint], vocabulary_size: int, at_least: int | None = None
) -> ConstraintAutomaton:
    """The automaton that tracks which constraints (of word ids) a caption satisfies; `at_least` of them are required.

    The last words are followed through a tree of all alternatives, from a word that breaks one off to the longest other
    that may have begun (Aho and Corasick 1975). Raises ValueError for an empty constraint, a word outside the
    vocabulary, and constraints that need more than 256 states.
    """
    phrases: dict[Words, int] = {}  # which constraints, as bits, an alternative completes
    for number, alternatives in enumerate(constraints):
        if not alternatives or not all(alternatives):
            raise ValueError(f"constraint {number + 1} has no words; leave it out")
        for words in alternatives:
            outside = [word for word in words if not 0 <= word < vocabulary_size]
            if outside:
                raise ValueError(
                    f"constraint {number + 1} holds word {outside[0]}, outside the vocabulary of {vocabulary_size}"
                )
            phrases[tuple(words)] = phrases.get(tuple(words), 0) | 1 << number
    begun = {words[:length] for words in phrases for length in range(len(words))} | {()}
    start: tuple[int, Words] = (0, ())
    places = {start: 0}
    pending = deque([start])
    steps: list[dict[int, int]] = []
    rest: list[int] = []

    def place(satisfied: int, last: Words) -> int:
        if (satisfied, last) not in places:
            if len(places) == MAX_STATES:
                raise ValueError(
                    f"{len(constraints)} constraints need more than {MAX_STATES} states; give fewer of them "
                    f"(each doubles the states), or shorter alternatives"
                )
            places[satisfied, last] = len(places)
            pending.append((satisfied, last))
        return places[satisfied, last]

    matter = sorted({word for words in phrases for word in words})
    while pending:
        satisfied, last = pending.popleft()
        transitions = {}
        for word in matter:
            read = (*last, word)
            tails = [read[cut:] for cut in range(len(read) + 1)]
            reached = satisfied
            for tail in tails:
                reached |= phrases.get(tail, 0)
            transitions[word] = place(reached, next(tail for tail in tails if tail in begun))
        steps.append(transitions)
        rest.append(place(satisfied, ()))
    num_satisfied = tuple(satisfied.bit_count() for satisfied, _ in places)
    count = len(constraints)
    required = count if at_least is None else min(at_least, count)
    return ConstraintAutomaton(count, required, num_satisfied, tuple(steps), tuple(rest))


@dataclass
class ConstrainedCaptions(Captions):
    """num_satisfied: (B, n) int64, how many of its image's constraints a caption satisfies.

    -1 where there are fewer captions than asked for (score -inf).
    """

    num_satisfied: Tensor


@torch.no_grad()
def constrained_beam_search(
    models: Models,
    memories: Memories,
    automata: Sequence[ConstraintAutomaton],
    *,
    beam_size: int,
    max_length: int,
    num_results: int = 1,
    length_normalization: bool = True,
) -> ConstrainedCaptions:
    """The `num_results` best captions of each image that satisfy its constraints, best first.

    If any beam satisfies as many constraints as the automaton requires, only such captions are returned; otherwise
    those that satisfy the most (`num_satisfied` gives the number). For the rest the search is `beam_search` with
    `beam_size` beams in every state: the cost grows with the number of states of the largest automaton.
    Raises ValueError unless there is one automaton per image and 1 <= num_results <= beam_size.
    """
    check_beams(beam_size, num_results)
    states = max((len(automaton.num_satisfied) for automaton in automata), default=1)
    decoder = Decoder(models, memories, states * beam_size, max_length)
    if len(automata) != len(decoder.images):
        raise ValueError(f"{len(automata)} automata for {len(decoder.images)} images; give one for each")
    transitions = _transitions(automata, states, decoder.sizes.vocabulary_size, decoder.device)
    beams = ConstrainedBeams(**vars(Beams.start(decoder, max_length)), beam_size=beam_size, transitions=transitions)
    results = search(decoder, beams, max_length)
    num_satisfied = _num_satisfied(automata, states, beam_size, decoder.device)
    # more than required is no better; dead beams are no captions
    enough = torch.tensor([automaton.num_required for automaton in automata], device=decoder.device)[:, None]
    counted = num_satisfied.clamp(max=enough).masked_fill(results.scores.isneginf(), -1)
    best, order = results.ranked(num_results, length_normalization, counted < counted.amax(1, keepdim=True))
    return ConstrainedCaptions(
        **vars(best), num_satisfied=num_satisfied.gather(1, order).masked_fill(best.scores.isneginf(), -1)
    )


def _transitions(automata: Sequence[ConstraintAutomaton], states: int, vocabulary: int, device: torch.device) -> Tensor:
    """(B, S, V) the next state; -1 for the states that a smaller automaton does not have."""
    table = torch.full((len(automata), states, vocabulary), -1, dtype=torch.int16)
    for image, automaton in enumerate(automata):
        for state, (steps, rest) in enumerate(zip(automaton.steps, automaton.rest, strict=True)):
            table[image, state] = rest
            table[image, state, list(steps)] = torch.tensor(list(steps.values()), dtype=torch.int16)
    return table.to(device)


def _num_satisfied(
    automata: Sequence[ConstraintAutomaton], states: int, beam_size: int, device: torch.device
) -> Tensor:
    """(B, S*K) how many constraints a beam satisfies; -1 for the states that a smaller automaton does not have."""
    rows = [[*automaton.num_satisfied, *[-1] * (states - len(automaton.num_satisfied))] for automaton in automata]
    return torch.tensor(rows, device=device).repeat_interleave(beam_size, 1)


@dataclass
class ConstrainedBeams(Beams):
    """S*K beams per image, of which rows s*K to s*K + K - 1 are in state s of its automaton.

    beam_size is K; transitions (B, S, V) hold the next state of each state and word.
    """

    beam_size: int
    transitions: Tensor

    def extend(self, log_probs: Tensor, position: int) -> Tensor:
        """The best K of what all beams offer to each state, from log_probs (B*S*K, V); their parents (B, S*K).

        An ended beam offers itself to its own state, once, as PAD.
        """
        rows, pad = self.ended.shape[1], self.sizes.pad
        log_probs = log_probs.unflatten(0, (-1, rows))
        target = self.transitions.repeat_interleave(self.beam_size, 1)  # (B, S*K, V)
        own_state = torch.arange(rows, device=log_probs.device) // self.beam_size
        offers = log_probs.masked_fill(self.ended[:, :, None], -torch.inf)
        offers[:, :, pad] = torch.where(self.ended, 0.0, offers[:, :, pad])
        target[:, :, pad] = torch.where(self.ended, own_state.to(target.dtype), target[:, :, pad])
        sums = self.scores[:, :, None] + offers
        best, places = [], []
        for state in range(rows // self.beam_size):
            candidates = sums.masked_fill(target != state, -torch.inf).flatten(1)
            value, place = candidates.topk(min(self.beam_size, candidates.shape[1]), -1)
            missing = self.beam_size - value.shape[1]  # a vocabulary smaller than the beam
            best.append(F.pad(value, (0, missing), value=-torch.inf))
            places.append(F.pad(place, (0, missing)))
        self.scores, chosen = torch.cat(best, 1), torch.cat(places, 1)
        vocabulary = log_probs.shape[-1]
        parent = chosen // vocabulary
        self.append(parent, chosen % vocabulary, offers.flatten(1).gather(1, chosen), position)
        return parent

    def finished(self) -> Tensor:
        return (self.ended | self.scores.isneginf()).all(1)

    def pick(self, images: Tensor) -> ConstrainedBeams:
        return replace(super().pick(images), transitions=self.transitions[images])
