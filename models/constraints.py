"""Constrained beam search (Anderson, Fernando, Johnson, Gould 2017): captions that must hold given words; any model.

A constraint is a set of alternatives, each one word or several in a row; a caption holds it when it holds one of them.
The constraints of an image become a finite-state machine. Its states say which of them are held so far and, between the
words of a longer alternative, how far the last words have come. The search keeps a beam for every state, so that a
caption on its way to a rare word is not crowded out by more probable ones that never get there.

Shapes: B images, S states, K beams a state, R = B*S*K rows, T caption tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import ModelSizes
from models.decoding import Captions, Memories, Models, _Beams, _Decoder, caption_lengths

Words = tuple[int, ...]
Constraint = Sequence[Words]  # its alternatives

MAX_STATES = 256  # eight constraints of single words; the beams of all states run at every step


@dataclass(frozen=True)
class ConstraintAutomaton:
    """The finite-state machine of one image's constraints; state 0 is the start.

    num_satisfied: for each state, how many of the `count` constraints a caption in it satisfies. `steps[state]` maps
    the words that matter there to the next state; every other word leads to `rest[state]`.
    """

    count: int
    num_satisfied: tuple[int, ...]
    steps: tuple[dict[int, int], ...]
    rest: tuple[int, ...]

    def follow(self, words: Sequence[int]) -> int:
        """The state that a caption's words lead to."""
        state = 0
        for word in words:
            state = self.steps[state].get(word, self.rest[state])
        return state


def build_automaton(constraints: Sequence[Constraint], vocabulary_size: int) -> ConstraintAutomaton:
    """The machine that tells which of the constraints (of word ids) a caption holds.

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

    def place(held: int, last: Words) -> int:
        if (held, last) not in places:
            if len(places) == MAX_STATES:
                raise ValueError(
                    f"{len(constraints)} constraints need more than {MAX_STATES} states; give fewer of them "
                    f"(each doubles the states), or shorter alternatives"
                )
            places[held, last] = len(places)
            pending.append((held, last))
        return places[held, last]

    matter = sorted({word for words in phrases for word in words})
    while pending:
        held, last = pending.popleft()
        own = {}
        for word in matter:
            seen = (*last, word)
            tails = [seen[cut:] for cut in range(len(seen) + 1)]
            now = held
            for tail in tails:
                now |= phrases.get(tail, 0)
            own[word] = place(now, next(tail for tail in tails if tail in begun))
        steps.append(own)
        rest.append(place(held, ()))
    held_counts = tuple(held.bit_count() for held, _ in places)
    return ConstraintAutomaton(len(constraints), held_counts, tuple(steps), tuple(rest))


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
    machines: Sequence[ConstraintAutomaton],
    *,
    beam_size: int,
    max_length: int,
    num_results: int = 1,
    at_least: int | None = None,
    length_normalization: bool = True,
) -> ConstrainedCaptions:
    """The `num_results` best captions of each image that hold its constraints, best first.

    `at_least` is how many of an image's constraints must be satisfied; None for all. If any beam satisfies that many,
    only such captions are returned; otherwise those that satisfy the most (`num_satisfied` gives the number). For the
    rest the search is `beam_search` with `beam_size` beams in every state: the cost grows with the number of states of
    the largest automaton. Raises ValueError unless there is one automaton per image and 1 <= num_results <= beam_size.
    """
    if beam_size < 1 or not 1 <= num_results <= beam_size:
        raise ValueError(
            f"num_results = {num_results} and beam_size = {beam_size}: expected 1 <= num_results <= beam_size"
        )
    states = max(
        (len(machine.num_satisfied) for machine in machines), default=1
    )  # without machines the count is refused below
    decoder = _Decoder(models, memories, states * beam_size, max_length)
    sizes, total, device = decoder.sizes, len(decoder.images), decoder.device
    if len(machines) != total:
        raise ValueError(f"{len(machines)} machines for {total} images; give one for each")
    transitions = _transitions(machines, states, sizes.vocabulary_size, device)
    rows = states * beam_size
    tokens = torch.full((total, rows, max_length), sizes.pad, device=device)
    tokens[:, :, 0] = sizes.sos
    none_ended = torch.zeros(total, rows, dtype=torch.bool, device=device)
    beams = results = _Beams(tokens, torch.empty(0), torch.empty(0), none_ended)
    for position in range(1, max_length):
        log_probs = decoder.step(beams.tokens[:, :, position - 1].flatten())
        if position == 1:
            beams.log_probs = log_probs.new_zeros(total, rows, max_length)
            beams.scores = log_probs.new_full((total, rows), -torch.inf)
            beams.scores[:, 0] = 0.0  # one real beam, in the start; the others are copies that must not be chosen
            results = beams.pick(decoder.images)
        parent = _extend(beams, log_probs.unflatten(0, (-1, rows)), transitions, position, sizes, beam_size)
        first_rows = torch.arange(0, parent.numel(), rows, device=device)
        decoder.select((first_rows[:, None] + parent).flatten())
        images, done = decoder.images, (beams.ended | beams.scores.isneginf()).all(1)
        kept = decoder.drop_finished(done)
        if kept is not None:
            results.write(images[done], beams.pick(done.nonzero()[:, 0]))
            beams, transitions = beams.pick(kept), transitions[kept]
            if not len(kept):
                break
    results.write(decoder.images, beams)
    return _best(results, machines, sizes, beam_size, num_results, at_least, length_normalization)


def _transitions(machines: Sequence[ConstraintAutomaton], states: int, vocabulary: int, device: torch.device) -> Tensor:
    """(B, S, V) the next state; -1 in the places of states that a smaller machine does not have."""
    table = torch.full((len(machines), states, vocabulary), -1, dtype=torch.int16)
    for image, machine in enumerate(machines):
        for state, (steps, rest) in enumerate(zip(machine.steps, machine.rest, strict=True)):
            table[image, state] = rest
            table[image, state, list(steps)] = torch.tensor(list(steps.values()), dtype=torch.int16)
    return table.to(device)


def _extend(
    beams: _Beams, log_probs: Tensor, transitions: Tensor, position: int, sizes: ModelSizes, beam_size: int
) -> Tensor:
    """The best K of what all beams offer to each state, log_probs (B, S*K, V); their parents (B, S*K).

    Rows s * K .. s * K + K - 1 are in state s. An ended beam offers itself to its own state, once, as PAD.
    """
    rows, vocabulary = log_probs.shape[1:]
    states = rows // beam_size
    target = transitions.repeat_interleave(beam_size, 1)  # (B, S*K, V)
    own = torch.arange(rows, device=log_probs.device) // beam_size
    offers = log_probs.masked_fill(beams.ended[:, :, None], -torch.inf)
    offers[:, :, sizes.pad] = torch.where(beams.ended, 0.0, offers[:, :, sizes.pad])
    target[:, :, sizes.pad] = torch.where(beams.ended, own.to(target.dtype), target[:, :, sizes.pad])
    sums = beams.scores[:, :, None] + offers
    best, places = [], []
    for state in range(states):
        here = sums.masked_fill(target != state, -torch.inf).flatten(1)
        value, place = here.topk(min(beam_size, here.shape[1]), -1)
        missing = beam_size - value.shape[1]  # a vocabulary smaller than the beam
        best.append(torch.nn.functional.pad(value, (0, missing), value=-torch.inf))
        places.append(torch.nn.functional.pad(place, (0, missing)))
    beams.scores, chosen = torch.cat(best, 1), torch.cat(places, 1)
    parent, word = chosen // vocabulary, chosen % vocabulary
    history = parent[:, :, None].expand_as(beams.tokens)
    beams.tokens = beams.tokens.gather(1, history)
    beams.tokens[:, :, position] = word
    beams.log_probs = beams.log_probs.gather(1, history)
    beams.log_probs[:, :, position] = offers.flatten(1).gather(1, chosen)
    beams.ended = beams.ended.gather(1, parent) | (word == sizes.eos)
    return parent


def _best(
    results: _Beams,
    machines: Sequence[ConstraintAutomaton],
    sizes: ModelSizes,
    beam_size: int,
    num_results: int,
    at_least: int | None,
    length_normalization: bool,
) -> ConstrainedCaptions:
    """Of all states' beams, first by whether they hold enough (or by how many they hold), then by score."""
    states = results.scores.shape[1] // beam_size
    held = torch.tensor(
        [[*m.num_satisfied, *[-1] * (states - len(m.num_satisfied))] for m in machines], device=results.scores.device
    )
    held = held.repeat_interleave(beam_size, 1)
    needed = [m.count if at_least is None else min(at_least, m.count) for m in machines]
    enough = torch.tensor(needed, device=held.device)[:, None]
    dead = results.scores.isneginf()
    reached = held.clamp(max=enough).masked_fill(dead, -1)  # more than enough is no better
    most = reached.amax(1, keepdim=True)
    lengths = caption_lengths(results.tokens, sizes.eos)
    ranking = results.scores / lengths if length_normalization else results.scores
    ranking, order = ranking.masked_fill(reached < most, -torch.inf).topk(num_results, -1)
    held, lengths = held.gather(1, order).masked_fill(ranking.isneginf(), -1), lengths.gather(1, order)
    longest = int(lengths.max())
    history = order[:, :, None].expand(-1, -1, longest)
    tokens, log_probs = (x[:, :, :longest].gather(1, history) for x in (results.tokens, results.log_probs))
    return ConstrainedCaptions(tokens, log_probs.float(), lengths, ranking.float(), held)
