"""The language of the demo model: a small grammar that writes short English stories and talks, and reads them again.

The grammar is a list of sentence patterns with slots (`{hero}`, `{his}`, `{a_colour} {thing}`). A story picks its cast
once, so names, pronouns, things and places agree from the first sentence to the last; reading uses the same patterns,
so a text can be judged: which sentences are well formed, and do they speak of one cast? Everything is drawn from the
seed that the caller gives. Tokens, the model and training are not known here.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

NAMES = {"she": ("Mia", "Anna", "Lucy", "Rosa", "Nora", "Ella"), "he": ("Tom", "Ben", "Max", "Leo", "Sam", "Finn")}
KINDS = ("fox", "bear", "rabbit", "owl", "mouse", "duck", "cat", "dog", "frog", "goat")
TRAITS = ("clever", "brave", "kind", "little", "old", "quiet", "funny", "young")
COLOURS = ("red", "blue", "green", "yellow", "white", "orange")
THINGS = ("ball", "kite", "basket", "boat", "lamp", "hat", "drum", "book", "key", "bell")
PLACES = {
    "in the forest": "the forest",
    "in the garden": "the garden",
    "by the river": "the river",
    "by the lake": "the lake",
    "on the hill": "the hill",
    "on the farm": "the farm",
    "near the village": "the village",
    "near the old mill": "the old mill",
}
FOODS = ("berries", "apples", "nuts", "carrots", "pears", "cakes")
RELATIVES = ("mother", "father", "brothers", "sisters")
TIMES = ("One morning,", "One evening,", "On a sunny day,", "On a cold day,", "In the spring,", "In the winter,")
LATER = ("One day,", "The next morning,", "That night,", "After lunch,", "Then one day,")
PRONOUNS = {"she": {"he": "she", "him": "her", "his": "her"}, "he": {"he": "he", "him": "him", "his": "his"}}

PATTERNS: dict[str, tuple[str, ...]] = {
    "opening": (
        "Once upon a time there was {a_trait} {kind} called {hero}.",
        "There was once {a_trait} {kind}, and {his} name was {hero}.",
        "{when} {hero} the {kind} sat {where}.",
        "{hero} was {a_trait} {kind}.",
    ),
    "home": ("{He} lived {home}.", "{His} house stood {home}.", "{He} lived {home} with {his} {relative}."),
    "friend": (
        "{His} best friend was {friend} the {friend_kind}.",
        "{hero} had a good friend called {friend}, {a_friend_trait} {friend_kind}.",
    ),
    "has": (
        "{He} had {a_colour} {thing}, and {he} loved it very much.",
        "{hero} liked to play with {his} {colour} {thing}.",
    ),
    "loses": ("{later} {he} could not find {his} {colour} {thing}.", "{later} the {colour} {thing} was gone."),
    "is sad": (
        "{hero} was very sad.",
        "{He} sat down and cried.",
        "{He} looked under {his} bed, but it was not there.",
    ),
    "asks": (
        '"Where is my {colour} {thing}?" asked {hero}.',
        '"Have you seen my {colour} {thing}?" {he} asked {friend}.',
    ),
    "replies": (
        '"I have not seen it," said {friend}, "but I will help you."',
        '"No," said {friend}, "but we can look for it together."',
    ),
    "search": ("They looked {where} and behind the trees.", "{hero} and {friend} looked {where}."),
    "find": (
        "At last {friend} found the {colour} {thing} {where}.",
        "Then {friend} saw the {thing} under a big tree.",
    ),
    "thanks": (
        '"Thank you, {friend}!" said {hero}.',
        "{hero} thanked {friend} and gave {friend_him} some {food}.",
    ),
    "finds": (
        "{later} {he} found {a_colour} {thing} {where}.",
        "{later} {hero} went to {spot} and found {a_colour} {thing}.",
    ),
    "thinks": ('"{friend} will like this {thing}," thought {hero}.', '"What a nice {thing}!" said {hero}.'),
    "gives": (
        "{hero} gave the {thing} to {friend}.",
        "{He} took the {colour} {thing} to {his} friend {friend}.",
    ),
    "is glad": (
        '"Is this {thing} for me?" asked {friend}.',
        "{friend} was so happy that {friend_he} danced.",
        "{friend} loved {friend_his} new {thing}.",
    ),
    "play": ("They played with the {thing} until the sun went down.", "They took the {thing} to {spot} and played."),
    "hungry": ("{later} {hero} was very hungry.", "{later} there was no food in {his} house."),
    "seeks": (
        "{He} looked for {food} {where}, but there were none.",
        "{He} walked to {spot}, but {he} found no {food}.",
    ),
    "meets": (
        "Then {he} met {friend}, {a_friend_trait} {friend_kind}.",
        "On the way {he} met {a_friend_trait} {friend_kind} called {friend}.",
    ),
    "offers": (
        '"I have many {food}," said {friend}.',
        '"Are you hungry?" asked {friend}.',
        '"Come and eat with me," said {friend}.',
    ),
    "eat": (
        "They sat down {where} and ate {food} together.",
        "The {food} were sweet, and {hero} ate them all.",
    ),
    "storm": (
        "{later} a big storm came, and it rained for hours.",
        "{later} the wind was strong and the sky was dark.",
    ),
    "trouble": (
        "{friend} was alone {where}, and {friend_he} was afraid.",
        "{friend} was {where} and could not find {friend_his} way home.",
    ),
    "calls": ('"Help me, {hero}!" called {friend}.', '"I am here, {hero}!" called {friend}.'),
    "rescue": (
        "{hero} was not afraid and ran to {spot}.",
        "{hero} ran to {spot} and took {friend_him} by the hand.",
    ),
    "safe": ("Soon they were safe and warm in {his} house.", "When the rain stopped, the two friends danced."),
    "ending": (
        "From that day on they were good friends.",
        "They laughed and went home.",
        "That night {hero} slept well.",
        "{hero} and {friend} were very happy.",
    ),
    "fact": (
        "{hero} is {a_trait} {kind}.",
        "{hero} lives {where}.",
        "{hero} has {a_colour} {thing}.",
        "{hero} likes {food}.",
    ),
    "answer": (
        "{He} is {a_trait} {kind}.",
        "{He} lives {where}.",
        "{He} has {a_colour} {thing}.",
        "{He} likes {food}.",
    ),
    "small talk": (
        "Hello! Shall I tell you a story?",
        "I am a very small model, and I tell short stories.",
        "You are welcome.",
        "Goodbye!",
    ),
}  # fmt: skip
# One question to each "fact", answered by the "answer" of the same number.
QUESTIONS = ("Who is {hero}?", "Where does {hero} live?", "What does {hero} have?", "What does {hero} like?")
REQUESTS = (
    "Tell me a story.",
    "Please tell me a story.",
    "Tell me a story about {hero}.",
    "Tell me a story about {a_trait} {kind}.",
    "Can you tell me a story about {hero} the {kind}?",
)
SMALL_TALK = (  # each answered by the "small talk" pattern of the same number
    ("Hello!", "Hello.", "Hi!"), ("Who are you?", "What can you do?"), ("Thank you.", "Thanks!"), ("Goodbye.", "Bye!"),
)  # fmt: skip

PLOTS = (
    ("opening", "home", "friend", "has", "loses", "is sad", "asks", "replies", "search", "find", "thanks", "ending"),
    ("opening", "home", "friend", "finds", "thinks", "gives", "is glad", "play", "ending"),
    ("opening", "home", "hungry", "seeks", "meets", "offers", "eat", "thanks", "ending"),
    ("opening", "home", "friend", "storm", "trouble", "calls", "rescue", "safe", "thanks", "ending"),
)
OPTIONAL = {"home", "is sad", "thinks", "play", "seeks", "thanks"}
# What a story says alike from end to end.
OF_ONE_CAST = ("hero", "kind", "friend", "friend_kind", "colour", "thing", "home", "where", "food")


@dataclass(frozen=True)
class Sentence:
    """One piece of a text that was read: `pattern` names the group it belongs to, None if no pattern writes it."""

    text: str
    pattern: str | None
    words: tuple[tuple[str, str], ...] = ()  # (slot of OF_ONE_CAST, what stood there)


@dataclass(frozen=True)
class Turn:
    """What one side of a talk says; `role` is "user" or "assistant"."""

    role: str
    text: str


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _people_slots(rng: random.Random) -> dict[str, str]:
    slots: dict[str, str] = {}
    names: list[str] = []
    for prefix, role in (("", "hero"), ("friend_", "friend")):
        gender = rng.choice(("she", "he"))
        slots[role] = rng.choice([name for name in NAMES[gender] if name not in names])
        names.append(slots[role])
        slots |= {prefix + case: word for case, word in PRONOUNS[gender].items()}
        slots[f"{prefix}kind"] = rng.choice(KINDS)
        slots[f"a_{prefix}trait"] = with_article(rng.choice(TRAITS))
    return slots | {"He": slots["he"].capitalize(), "His": slots["his"].capitalize()}


def _cast(rng: random.Random) -> dict[str, str]:
    """What every slot says in one story, except those that `_write` draws for each sentence."""
    colour = rng.choice(COLOURS)
    home, where = rng.sample(tuple(PLACES), 2)
    slots = {"colour": colour, "a_colour": with_article(colour), "thing": rng.choice(THINGS), "food": rng.choice(FOODS)}
    return _people_slots(rng) | slots | {"home": home, "where": where, "spot": PLACES[where]}


def _write(pattern: str, cast: dict[str, str], rng: random.Random) -> str:
    passing = {"when": rng.choice(TIMES), "later": rng.choice(LATER), "relative": rng.choice(RELATIVES)}
    return pattern.format_map(passing | cast)


def _tell(cast: dict[str, str], rng: random.Random) -> str:
    groups = [group for group in rng.choice(PLOTS) if group not in OPTIONAL or rng.random() < 0.6]
    return " ".join(_write(rng.choice(PATTERNS[group]), cast, rng) for group in groups)


def story(rng: random.Random) -> str:
    """One story of 6 to 12 sentences about one cast."""
    return _tell(_cast(rng), rng)


def questions_about_facts(rng: random.Random) -> list[Turn]:
    cast = _cast(rng)
    told = rng.sample(range(len(QUESTIONS)), rng.randint(1, len(QUESTIONS)))
    asked = rng.sample(told, rng.randint(1, len(told)))
    facts = " ".join(_write(PATTERNS["fact"][number], cast, rng) for number in told)
    turns: list[Turn] = []
    for number in asked:
        question = QUESTIONS[number].format_map(cast)
        turns.append(Turn("user", question if turns else f"{facts} {question}"))
        turns.append(Turn("assistant", _write(PATTERNS["answer"][number], cast, rng)))
    return turns


def _small_talk(rng: random.Random, number: int) -> list[Turn]:
    return [Turn("user", rng.choice(SMALL_TALK[number])), Turn("assistant", PATTERNS["small talk"][number])]


def _story_on_request(rng: random.Random) -> list[Turn]:
    cast = _cast(rng)
    greeting = _small_talk(rng, rng.randrange(2)) if rng.random() < 0.3 else []
    request = "Yes, please." if greeting and rng.random() < 0.5 else rng.choice(REQUESTS).format_map(cast)
    leave = _small_talk(rng, rng.randrange(2, 4)) if rng.random() < 0.3 else []
    return [*greeting, Turn("user", request), Turn("assistant", _tell(cast, rng)), *leave]


def conversation(rng: random.Random) -> list[Turn]:
    """A talk of pairs of turns, the user first: facts and questions about them, a story on request, or small talk."""
    kind = rng.random()
    if kind < 0.6:
        return questions_about_facts(rng)
    return _story_on_request(rng) if kind < 0.9 else _small_talk(rng, rng.randrange(len(SMALL_TALK)))


def documents(seed: int, count: int) -> Iterator[str | list[Turn]]:
    """`count` documents drawn from `seed`: two conversations to every story."""
    rng = random.Random(seed)
    for number in range(count):
        yield story(rng) if number % 3 == 2 else conversation(rng)


def _any_of(words: Sequence[str]) -> str:
    return "(?:" + "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) + ")"


@cache
def _slot_expressions(hero_gender: str, friend_gender: str) -> dict[str, str]:
    hero, friend = PRONOUNS[hero_gender], PRONOUNS[friend_gender]
    words: dict[str, Sequence[str]] = {
        "hero": NAMES[hero_gender], "friend": NAMES[friend_gender], "kind": KINDS, "friend_kind": KINDS,
        "a_trait": tuple(map(with_article, TRAITS)), "a_friend_trait": tuple(map(with_article, TRAITS)),
        "colour": COLOURS, "a_colour": tuple(map(with_article, COLOURS)), "thing": THINGS, "food": FOODS,
        "home": tuple(PLACES), "where": tuple(PLACES), "spot": tuple(PLACES.values()),
        "relative": RELATIVES, "when": TIMES, "later": LATER,
        "He": (hero["he"].capitalize(),), "His": (hero["his"].capitalize(),),
    }  # fmt: skip
    words |= {case: (word,) for case, word in hero.items()}
    words |= {f"friend_{case}": (word,) for case, word in friend.items()}
    return {slot: _any_of(choices) for slot, choices in words.items()}


def _expression(pattern: str, slots: dict[str, str]) -> re.Pattern[str]:
    parts: list[str] = []
    named: set[str] = set()
    for literal, slot in re.findall(r"([^{]*)(?:\{(\w+)\})?", pattern):
        parts.append(re.escape(literal))
        if slot in OF_ONE_CAST and slot not in named:
            named.add(slot)
            parts.append(f"(?P<{slot}>{slots[slot]})")
        elif slot:
            parts.append(f"(?P={slot})" if slot in named else slots[slot])
    return re.compile("".join(parts))


@cache
def _expressions() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Every pattern for every pair of genders, each distinct expression once."""
    found: dict[str, tuple[str, re.Pattern[str]]] = {}
    for group, patterns in PATTERNS.items():
        for pattern in patterns:
            for hero_gender in PRONOUNS:
                for friend_gender in PRONOUNS:
                    expression = _expression(pattern, _slot_expressions(hero_gender, friend_gender))
                    found.setdefault(expression.pattern, (group, expression))
    return tuple(found.values())


def read(text: str) -> list[Sentence]:
    """Cut `text` into sentences, each with the pattern group that writes it, or None; an unfinished one has None."""
    sentences: list[Sentence] = []
    position = 0
    while position < len(text):
        candidates = [(group, expression.match(text, position)) for group, expression in _expressions()]
        matches = [(match.end(), group, match) for group, match in candidates if match]
        if matches:
            position, group, match = max(matches, key=lambda candidate: candidate[0])
            sentences.append(Sentence(match.group(), group, tuple(match.groupdict().items())))
        else:
            end = re.compile(r'[.!?]"?(?= |$)').search(text, position)
            stop = end.end() if end else len(text)
            sentences.append(Sentence(text[position:stop], None))
            position = stop
        position += text.startswith(" ", position)
    return sentences


def is_of_one_cast(sentences: Sequence[Sentence]) -> bool:
    """True if names, kinds and the thing are the same in all sentences that say them."""
    seen: dict[str, str] = {}
    return all(seen.setdefault(slot, word) == word for sentence in sentences for slot, word in sentence.words)
