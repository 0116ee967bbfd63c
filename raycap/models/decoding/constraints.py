"""Constrained beam search (Anderson, Fernando, Johnson, Gould 2017): captions that must contain given words.

The search works with every model. A constraint is a set of alternatives, each of one or more consecutive words. A
caption satisfies the constraint if it contains one of them. The constraints of an image become a finite-state
automaton, which reads the caption. The automaton's state says which constraints are satisfied, and how much of a longer
alternative the last words match. Every state has its own beams, so that a caption with a rare word that is required
does not have to compete with more probable captions without this word.

Shapes: B images, S states, K beams per state, R = B*S*K rows, T caption tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycap.models.decoding.search import Beams, Captions, Decoder, Memories, Models, ScoreRules, search

Words = tuple[int, ...]
Constraint = Sequence[Words]  # its alternatives

MAX_STATES = 256  # as many as eight constraints of single words need; each state has its own beams


@dataclass(frozen=True)
class ConstraintAutomaton:
    """The finite-state automaton of one image's constraints. State 0 is the start."""

    num_required: int  # number of constraints that a caption must satisfy
    num_satisfied: tuple[int, ...]  # for each state, how many constraints a caption in this state satisfies
    steps: tuple[dict[int, int], ...]  # for each state, the next state after each word of the constraints
    rest: tuple[int, ...]  # for each state, the next state after any other word


def build_automaton(
    constraints: Sequence[Constraint], vocabulary_size: int, at_least: int | None = None
) -> ConstraintAutomaton:
    """Builds the automaton of constraints that are given as word ids.

    at_least: how many constraints a caption must satisfy. If it is None, a caption must satisfy all. A state is the set
    of satisfied constraints together with the longest beginning of an alternative that the last words form (Aho and
    Corasick 1975). Raises ValueError for an empty constraint, a word outside the vocabulary, and constraints that need
    more than 256 states.
    """
    phrases: dict[Words, int] = {}  # for each alternative, a bit mask of the constraints that it satisfies
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
    prefixes = {words[:length] for words in phrases for length in range(len(words))} | {()}
    states: dict[tuple[int, Words], int] = {(0, ()): 0}  # the number of each state
    pending: deque[tuple[int, Words]] = deque(states)
    steps: list[dict[int, int]] = []
    rest: list[int] = []

    def state_number(satisfied: int, prefix: Words) -> int:
        """Returns the number of a state, and adds the state if it is new."""
        if (satisfied, prefix) not in states:
            if len(states) == MAX_STATES:
                raise ValueError(
                    f"{len(constraints)} constraints need more than {MAX_STATES} states; give fewer of them "
                    f"(each doubles the states), or shorter alternatives"
                )
            states[satisfied, prefix] = len(states)
            pending.append((satisfied, prefix))
        return states[satisfied, prefix]

    constraint_words = sorted({word for words in phrases for word in words})
    while pending:
        satisfied, prefix = pending.popleft()
        transitions = {}
        for word in constraint_words:
            last_words = (*prefix, word)
            suffixes = [last_words[first:] for first in range(len(last_words) + 1)]  # the longest first
            now_satisfied = satisfied
            for suffix in suffixes:
                now_satisfied |= phrases.get(suffix, 0)
            longest_prefix = next(suffix for suffix in suffixes if suffix in prefixes)
            transitions[word] = state_number(now_satisfied, longest_prefix)
        steps.append(transitions)
        rest.append(state_number(satisfied, ()))
    num_satisfied = tuple(satisfied.bit_count() for satisfied, _ in states)
    required = len(constraints) if at_least is None else min(at_least, len(constraints))
    return ConstraintAutomaton(required, num_satisfied, tuple(steps), tuple(rest))


@dataclass
class ConstrainedCaptions(Captions):
    """Captions with the number of constraints that each satisfies."""

    num_satisfied: Tensor  # (B, n) int64; -1 in the places of captions that were not found


@torch.no_grad()
def constrained_beam_search(
    models: Models,
    memories: Memories,
    automata: Sequence[ConstraintAutomaton],
    *,
    beam_size: int,
    max_length: int,
    num_results: int = 1,
    rules: ScoreRules = ScoreRules(),
) -> ConstrainedCaptions:
    """Returns the `num_results` best captions of each image that satisfy its constraints, best first.

    If no beam satisfies as many constraints as required, the captions that satisfy the most are returned. Each state
    has `beam_size` beams, which compete as in `beam_search`, so that the cost grows with the number of states of the
    largest automaton. automata: one for each image.
    """
    states = max((len(automaton.num_satisfied) for automaton in automata), default=1)
    decoder = Decoder(models, memories, states * beam_size, max_length)
    transitions = _transitions(automata, states, decoder.sizes.vocabulary_size, decoder.device)
    beams = ConstrainedBeams(**vars(Beams.start(decoder, max_length)), beam_size=beam_size, transitions=transitions)
    results = search(decoder, beams, max_length, rules)
    # a state that a smaller automaton does not have counts as -1 constraints, which is below every real state
    by_state = pad_sequence([torch.tensor(each.num_satisfied) for each in automata], True, padding_value=-1)  # (B, S)
    num_satisfied = by_state.to(decoder.device).repeat_interleave(beam_size, 1)  # (B, S*K)
    # captions beyond the required number rank by their score alone; a beam with score -inf is no caption
    required = torch.tensor([automaton.num_required for automaton in automata], device=decoder.device)[:, None]
    counted = num_satisfied.clamp(max=required).masked_fill(results.scores.isneginf(), -1)
    excluded = counted < counted.amax(1, keepdim=True)
    best, order = results.ranked(num_results, rules.length_normalization, excluded)
    return ConstrainedCaptions(
        **vars(best), num_satisfied=num_satisfied.gather(1, order).masked_fill(best.scores.isneginf(), -1)
    )


def _transitions(automata: Sequence[ConstraintAutomaton], states: int, vocabulary: int, device: torch.device) -> Tensor:
    """Returns the next states (B, S, V) of each state and word, or -1 for states that a smaller automaton lacks."""
    table = torch.full((len(automata), states, vocabulary), -1, dtype=torch.int16)
    for image, automaton in enumerate(automata):
        for state, (steps, rest) in enumerate(zip(automaton.steps, automaton.rest, strict=True)):
            table[image, state] = rest
            table[image, state, list(steps)] = torch.tensor(list(steps.values()), dtype=torch.int16)
    return table.to(device)


@dataclass
class ConstrainedBeams(Beams):
    """S*K beams per image. The beams s*K to s*K + K - 1 are in state s of the image's automaton."""

    beam_size: int  # K
    transitions: Tensor  # the next states (B, S, V) of each state and word

    def extend(self, log_probs: Tensor, position: int) -> Tensor:
        """Adds words at `position`, so that each state gets its K best beams. Returns their parents (B, S*K).

        log_probs: of the next word, (B*S*K, V). An ended beam stays in its state, and continues only with PAD, which
        has the log-probability 0.
        """
        num_beams, pad = self.ended.shape[1], self.sizes.pad
        current_state = torch.arange(num_beams, device=log_probs.device) // self.beam_size
        next_state = self.transitions.repeat_interleave(self.beam_size, 1)  # (B, S*K, V)
        next_state[:, :, pad] = torch.where(self.ended, current_state.to(next_state.dtype), next_state[:, :, pad])
        offers = log_probs.unflatten(0, (-1, num_beams)).masked_fill(self.ended[:, :, None], -torch.inf)
        offers[:, :, pad] = torch.where(self.ended, 0.0, offers[:, :, pad])
        sums = self.scores[:, :, None] + offers
        best, indices = [], []
        for state in range(num_beams // self.beam_size):
            candidates = sums.masked_fill(next_state != state, -torch.inf).flatten(1)
            value, index = candidates.topk(min(self.beam_size, candidates.shape[1]), -1)
            missing = self.beam_size - value.shape[1]  # above 0 if there are fewer candidates than beams
            best.append(F.pad(value, (0, missing), value=-torch.inf))
            indices.append(F.pad(index, (0, missing)))
        self.scores, chosen = torch.cat(best, 1), torch.cat(indices, 1)
        vocabulary = log_probs.shape[-1]
        parent = chosen // vocabulary
        self.append(parent, chosen % vocabulary, offers.flatten(1).gather(1, chosen), position)
        return parent

    def finished(self) -> Tensor:
        return (self.ended | self.scores.isneginf()).all(1)

    def pick(self, images: Tensor) -> ConstrainedBeams:
        return replace(super().pick(images), transitions=self.transitions[images])
