"""The RULER tasks that `kvfold eval` builds: what is hidden, what is expected, and how long the
prompts are.
"""

import re
from collections import Counter

import pytest

from kvfold.convert.errors import InputError
from kvfold.convert.measure.ruler import draw_ruler, english_words
from kvfold.convert.request import RULER


def words(prompt):
    """A size that needs no tokenizer: every word and number is a token."""
    return len(re.findall(r"\w+|\S", f"{prompt.text} {prompt.opening}"))


@pytest.mark.parametrize("length", [600, 5000])
@pytest.mark.parametrize("task", RULER)
def test_prompts_fill_their_length(task, length):
    prompts = draw_ruler(task, length, 3, 0, words)
    sizes = [words(prompt) + prompt.most for prompt in prompts]
    assert all(0.85 * length < size <= length for size in sizes)
    assert len({prompt.text for prompt in prompts}) == 3
    assert [prompt.text for prompt in draw_ruler(task, length, 3, 0, words)] == [
        prompt.text for prompt in prompts
    ]
    assert draw_ruler(task, length, 1, 1, words)[0].text != prompts[0].text


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_one_needle_is_asked_for(task):
    for prompt in draw_ruler(task, 900, 4, 0, words):
        key = re.search(r"magic (\w+) for (\S+) mentioned in the provided text\?", prompt.text)
        needle = f"One of the special magic {key[1]}s for {key[2]} is: {prompt.expected[0]}."
        lines = prompt.text.split("\n")
        assert lines.count(needle) == 1
        others = [line for line in lines[1:-1] if line != needle]
        if task == "niah_single_1":
            assert {*others} == {
                "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back"
                " again."
            }
            assert prompt.chance == 0
        else:
            assert len({*others}) == len(others)
            assert all(line.startswith("One of the special magic") for line in others)
            assert prompt.chance == 1 / (len(others) + 1)
        assert len(prompt.expected[0]) == (36 if task == "niah_multikey_3" else 7)
        assert prompt.opening.endswith(
            f"magic {key[1]} for {key[2]} mentioned in the provided text is"
        )


def test_a_chain_of_variables_holds_one_value():
    prompt = draw_ruler("vt", 900, 1, 0, words)[0]
    example, asked = prompt.text.split("\n\nMemorize", 1)
    assert example.count("VAR ") > 5
    values: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
        values[name] = values.get(value, value)
    assert tuple(values) == prompt.expected
    assert {*values.values()} == {re.search(r"assigned the value (\d+) in", asked)[1]}


@pytest.mark.parametrize(("length", "often", "seldom"), [(1500, 6, 1), (5000, 30, 3)])
def test_the_commonest_words_are_expected(length, often, seldom):
    prompt = draw_ruler("cwe", length, 1, 0, words)[0]
    example, asked = prompt.text.split("\nBelow", 1)
    counts = Counter(re.findall(r"\d+\. (\w+)", asked))
    assert {counts[word] for word in prompt.expected} == {often}
    assert {count for word, count in counts.items() if word not in prompt.expected} == {seldom}
    assert prompt.chance == 10 / len(counts)
    assert {*counts} <= {*english_words()}
    assert re.search(r"in the list are: 1\. \w+ 2\. ", example)


def test_the_commonest_coded_words_follow_the_dots():
    prompt = draw_ruler("fwe", 3000, 1, 0, words)[0]
    text = prompt.text.split("coded words. ", 1)[1].split("\nQuestion")[0]
    (dots, most), *others = Counter(text.split()).most_common()
    assert dots == "..."
    assert tuple(word for word, _ in others[:3]) == prompt.expected
    assert [round(most / count) for _, count in others[:3]] == [4, 9, 16]
    assert prompt.chance == 3 / len(others)


def test_a_length_without_room_is_refused(told):
    with pytest.raises(InputError) as error:
        draw_ruler("vt", 128, 2, 0, words)
    told(error.value.message)
