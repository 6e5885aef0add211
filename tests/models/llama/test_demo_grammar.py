"""The demo model's grammar: it accepts what it writes, refuses what is wrong, and draws everything from the seed."""

import random

import pytest

from cheetah.models.demo import grammar as demo_grammar
from cheetah.models.demo.grammar import documents, is_of_one_cast, read, story


def is_accepted(text: str) -> bool:
    return all(sentence.pattern for sentence in read(text))


def test_every_story_is_read_back() -> None:
    rng = random.Random(7)
    for text in (story(rng) for _ in range(300)):
        sentences = read(text)
        assert " ".join(sentence.text for sentence in sentences) == text
        assert all(sentence.pattern for sentence in sentences), text
        assert is_of_one_cast(sentences), text


def test_every_reply_is_read_back() -> None:
    talks = [document for document in documents(3, 300) if not isinstance(document, str)]
    replies = [turn.text for talk in talks for turn in talk if turn.role == "assistant"]
    assert len(talks) == 200
    assert all(map(is_accepted, replies))


def test_talks_alternate() -> None:
    for talk in documents(4, 300):
        if not isinstance(talk, str):
            assert [turn.role for turn in talk] == ["user", "assistant"] * (len(talk) // 2)


@pytest.mark.parametrize(
    "sentence",
    [
        "Mia sat down and cries.",
        "Mia liked to play with his red kite.",  # the pronoun of another gender
        "He had a orange kite, and he loved it very much.",  # the article
        "Ben was so happy that she danced.",
        "Once upon a time there was a clever fox called Mia",  # no full stop
        "Then he met Ella, a funny cat",
        '"Where is my red kite? asked Mia.',
        "The nuts were sweet, and Mia ate them all!",
    ],
)
def test_a_wrong_sentence_is_not_accepted(sentence: str) -> None:
    assert not is_accepted(sentence)


def test_one_wrong_sentence_leaves_its_neighbours() -> None:
    good, bad = "Mia was very sad.", "Mia were sad."
    patterns = [sentence.pattern for sentence in read(f"{good} {bad} {good}")]
    assert patterns == ["is sad", None, "is sad"]


def test_another_cast_is_noticed() -> None:
    assert is_of_one_cast(read("Mia was very sad. That night Mia slept well."))
    assert not is_of_one_cast(read("Mia was very sad. That night Rosa slept well."))


def test_same_seed_same_documents() -> None:
    assert list(documents(5, 50)) == list(documents(5, 50))
    assert list(documents(5, 50)) != list(documents(6, 50))


def test_an_answer_follows_from_the_facts() -> None:
    for seed in range(50):
        talk = demo_grammar.questions_about_facts(random.Random(seed))
        facts = talk[0].text
        for answer in (turn for turn in talk if turn.role == "assistant"):
            said = answer.text.split(" ", 1)[1]  # without the pronoun
            assert said in facts
