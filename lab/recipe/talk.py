"""Writes the conversational training text: sums, short stories, small facts, questions about FlowSpec.

Owns every sentence the bundled model learnt to chat from, and the split that keeps the measured prompts out
of training. Knows nothing of tokens or of training.
"""

from __future__ import annotations

import random
import sys
import zlib
from dataclasses import dataclass
from importlib import resources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HELD_OUT_ONE_IN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One question and its answer; `domain` names the kind of talk it belongs to."""

    ask: str
    say: str
    domain: str


def is_held_out(question: str) -> bool:
    """Whether a question is kept out of training so that it can be measured honestly."""
    return zlib.crc32(question.strip().lower().encode()) % HELD_OUT_ONE_IN == 0


# ---------------------------------------------------------------------------------------------------- sums

SUM_FORMS = (
    "What is {e}?", "What is {e}?", "What is {e}?", "{e}", "{e} =", "{e}?", "How much is {e}?", "Calculate {e}.",
    "what's {e}", "Can you tell me {e}?", "Please work out {e}.", "What does {e} make?",
)
SPOKEN = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}


def sum_key(a: int, op: str, b: int) -> str:
    """The canonical form of a sum; a sum is held out in every wording or in none."""
    return f"{a} {op} {b}"


def work_out(a: int, op: str, b: int) -> tuple[int, str]:
    """The result of a sum and the steps that lead there, as the model should write them."""
    if op == "+":
        result = a + b
        if a < 10 and b < 10:
            return result, ""
        parts, total = [], 0
        for scale in (1000, 100, 10, 1):
            x, y = a // scale % 10 * scale, b // scale % 10 * scale
            if x == y == 0:
                continue
            before, total = total, total + x + y
            parts.append(f"{x} + {y} = {x + y}" + (f", {before} + {x + y} = {total}" if before else ""))
        return result, "; ".join(parts)
    if op == "-":
        result = a - b
        if a < 20:
            return result, ""
        parts, left = [], a
        for scale in (1000, 100, 10, 1):
            y = b // scale % 10 * scale
            if y:
                parts.append(f"{left} - {y} = {left - y}")
                left -= y
        return result, "; ".join(parts) if len(parts) > 1 else ""
    if op == "x":
        result = a * b
        if a <= 12 and b <= 12:
            return result, ""
        parts, total = [], 0
        for scale in (100, 10, 1):
            x = a // scale % 10 * scale
            if x:
                before, total = total, total + x * b
                parts.append(f"{x} x {b} = {x * b}" + (f", {before} + {x * b} = {total}" if before else ""))
        return result, "; ".join(parts)
    if op == "/":
        return a // b, f"{b} x {a // b} = {a}"
    raise ValueError(f"unknown operator {op!r}")


def draw_sum(rng: random.Random) -> tuple[int, str, int]:
    """A random sum whose result is a whole number that is not negative."""
    op = rng.choice("+++++---xx/")
    if op in "+-":
        digits = rng.choice((1, 2, 2, 2, 2, 3, 3))
        a, b = rng.randint(0, 10**digits - 1), rng.randint(0, 10 ** rng.randint(1, digits) - 1)
        return (max(a, b), op, min(a, b)) if op == "-" else (a, op, b) if rng.random() < 0.5 else (b, op, a)
    if op == "x":
        return (rng.randint(2, 12), op, rng.randint(2, 12)) if rng.random() < 0.6 else (rng.randint(11, 99), op, rng.randint(2, 9))
    b, quotient = rng.randint(2, 12), rng.randint(1, 12)
    return b * quotient, op, b


def answer_sum(a: int, op: str, b: int) -> str:
    """The whole answer to a sum: steps where they help, then the result."""
    result, steps = work_out(a, op, b)
    return f"{steps}.\nSo {a} {op} {b} = {result}." if steps else f"{a} {op} {b} = {result}."


def sum_exchange(rng: random.Random, *, held_out: bool = False) -> Exchange:
    while True:
        a, op, b = draw_sum(rng)
        if is_held_out(sum_key(a, op, b)) == held_out:
            break
    shown = op if rng.random() < 0.85 else {"x": rng.choice("*×"), "/": "÷"}.get(op, op)
    expression = f"{a} {SPOKEN[op]} {b}" if rng.random() < 0.2 else f"{a} {shown} {b}"
    if shown == op and rng.random() < 0.06:
        expression = expression.replace(" ", "")
    return Exchange(ask=rng.choice(SUM_FORMS).format(e=expression), say=answer_sum(a, op, b), domain="sums")


THINGS = "apples pears books marbles stamps coins shells pencils cards eggs buttons stickers cookies balloons kites".split()
NAMES = (
    "Anna Ben Clara David Ella Finn Grace Hugo Ida Jack Kira Leo Mia Noah Olga Paul Quinn Rosa Sam Tara Uma Viktor Wanda "
    "Yusuf Zoe Amir Bella Carlos Dora Emil Fatima Goran Hana Ivan Juno Karl Lina Milo Nina Oscar"
).split()


def small_problem(rng: random.Random) -> Exchange:
    """A one-step word problem."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    kind = rng.randrange(4)
    while True:
        a, b = rng.randint(2, 60), rng.randint(2, 40)
        if kind == 1 and b > a:
            a, b = b, a
        if kind == 2:
            a, b = rng.randint(2, 12), rng.randint(2, 12)
        op = "+-x+"[kind]
        if not is_held_out(sum_key(a, op, b)):
            break
    ask, verb = (
        (f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", "has"),
        (f"{name} has {a} {thing} and gives {b} to {other}. How many {thing} are left?", "has"),
        (f"{name} has {a} boxes with {b} {thing} in each. How many {thing} are there in all?", "has"),
        (f"{name} finds {a} {thing} and {other} finds {b}. How many do they have together?", "have"),
    )[kind]
    result, _ = work_out(a, op, b)
    who = {0: f"{name} {verb} {result} {thing} now", 1: f"{name} {verb} {result} {thing} left",
           2: f"There are {result} {thing} in all", 3: f"They {verb} {result} {thing} together"}[kind]
    return Exchange(ask=ask, say=f"{answer_sum(a, op, b)} {who}.", domain="sums")


# ------------------------------------------------------------------------------------------------- stories

ANIMALS = "fox mouse rabbit owl cat dog bear duck frog hedgehog squirrel goat sparrow turtle otter lamb pony crow".split()
PLACES = (
    "a quiet forest|a small village|an old lighthouse|a garden behind the school|a house by the sea|a farm on a hill|"
    "a busy harbour|a snowy valley|a town with a big clock|a castle on an island"
).split("|")
TRAITS = "curious shy brave clever lazy cheerful careful hungry kind stubborn tiny proud gentle sleepy".split()
TREASURES = (
    "a silver key|a red balloon|an old map|a golden button|a broken clock|a paper boat|a blue lantern|a wooden flute|"
    "a letter without a name|a box of seeds|a round stone that shone at night|a warm scarf"
).split("|")
WEATHER = "One rainy morning|One sunny day|One cold evening|Late one night|One windy afternoon|Early in spring|On the first day of snow".split("|")
LESSONS = (
    "it is good to share|a friend is worth more than gold|it helps to ask|small steps go a long way|"
    "being brave does not mean being loud|patience brings good things|everyone can be useful|it is fine to make mistakes"
).split("|")
STORY_FORMS = (
    "Tell me a story.", "Tell me a short story.", "Tell me a story about a {s}.", "Write a short story about a {s}.",
    "Can you tell me a story about a {s}?", "I want a story about a {s}.", "A story about a {s}, please.",
    "Tell me a story about a {t} {s}.", "Tell a bedtime story about a {s}.", "Write a story about a {s} and {o}.",
    "Tell me a story with a {s} in it.", "Please tell me a short story about a {s} who is {t}.",
)
OPENINGS = (
    "Once upon a time there was a {t} {s} named {n} who lived in {p}.",
    "In {p} there lived a {t} {s} called {n}.",
    "{n} was a {t} {s} who lived in {p}.",
    "There was once a {t} {s} in {p}. Everyone called the {s} {n}.",
)
FINDS = (
    "{w}, {n} found {o} under a tree.", "{w}, {n} saw {o} floating in the water.", "{w}, somebody left {o} at the door of {n}.",
    "{w}, the wind carried {o} right to {n}.",
)
PROBLEMS = (
    "But it belonged to somebody else, and {n} wanted to bring it back.",
    "But {n} did not know what it was for.",
    "But a {a} named {m} said it was lost and looked very sad.",
    "But when {n} picked it up, it slipped and fell into a deep hole.",
    "But nobody believed {n}, not even {m} the {a}.",
)
JOURNEYS = (
    "So {n} asked {m} the {a} for help, and they walked together all day.",
    "{n} thought for a long time and then went to see {m}, the wise old {a}.",
    "{n} and {m} the {a} looked everywhere: behind the wall, over the bridge and along the river.",
    "At first {n} was afraid, but {m} the {a} said, \"Come, we will do it together.\"",
)
TURNS = (
    "In the end they found the owner, who laughed with joy and gave them warm bread.",
    "Then {m} had an idea, and with a long rope and a little luck everything was put right.",
    "When the moon came up, it showed them the way, and they understood at last.",
    "They worked until the evening, and then, all at once, it was easy.",
)
ENDINGS = (
    "From that day on {n} and {m} were the best of friends.",
    "{n} went home happy and slept very well that night.",
    "And {n} learned that {l}.",
    "That night {n} told the story to everybody, and they all agreed that {l}.",
)


def story_exchange(rng: random.Random) -> Exchange:
    subject, animal = rng.sample(ANIMALS, 2)
    name, friend = rng.sample(NAMES, 2)
    words = {
        "s": subject, "a": animal, "n": name, "m": friend, "t": rng.choice(TRAITS), "p": rng.choice(PLACES),
        "o": rng.choice(TREASURES), "w": rng.choice(WEATHER), "l": rng.choice(LESSONS),
    }
    parts = [rng.choice(OPENINGS), rng.choice(FINDS), rng.choice(PROBLEMS), rng.choice(JOURNEYS), rng.choice(TURNS), rng.choice(ENDINGS)]
    ask = rng.choice(STORY_FORMS).format(**words)
    if is_held_out(ask):
        ask = "Tell me a story."
    return Exchange(ask=ask, say=fix_articles(" ".join(parts).format(**words)), domain="stories")


def fix_articles(text: str) -> str:
    """`a owl` -> `an owl`; the grammars above always write `a`."""
    words = text.split(" ")
    return " ".join(
        {"a": "an", "A": "An"}.get(word, word) if word in ("a", "A") and following[:1] in "aeio" and following else word
        for word, following in zip(words, [*words[1:], ""], strict=True)
    )


# --------------------------------------------------------------------------------------------- small facts

CAPITALS = dict(
    pair.split("=") for pair in (
        "France=Paris Germany=Berlin Italy=Rome Spain=Madrid Portugal=Lisbon Austria=Vienna Poland=Warsaw Greece=Athens "
        "Norway=Oslo Sweden=Stockholm Finland=Helsinki Denmark=Copenhagen Ireland=Dublin England=London Scotland=Edinburgh "
        "Russia=Moscow China=Beijing Japan=Tokyo India=Delhi Egypt=Cairo Kenya=Nairobi Canada=Ottawa Mexico=Mexico_City "
        "Brazil=Brasilia Argentina=Buenos_Aires Chile=Santiago Peru=Lima Cuba=Havana Australia=Canberra Hungary=Budapest "
        "Turkey=Ankara Iceland=Reykjavik Belgium=Brussels Switzerland=Bern Thailand=Bangkok Vietnam=Hanoi"
    ).split()
)
OPPOSITES = (
    "hot cold|big small|fast slow|day night|happy sad|old new|up down|open closed|light dark|full empty|early late|"
    "hard soft|rich poor|near far|high low|long short|strong weak|wet dry|first last|left right|clean dirty|loud quiet"
).split("|")
SOUNDS = "dog=woof cat=meow cow=moo duck=quack sheep=baa pig=oink frog=croak bee=buzz owl=hoot lion=roar mouse=squeak".split()
COLOURS = "sky=blue grass=green snow=white sun=yellow blood=red coal=black orange=orange banana=yellow leaf=green lemon=yellow".split()
WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SPELL = "cat house river garden window flower pencil orange winter summer bridge letter tree device token stage layer model".split()
GREETINGS = (
    ("Hello", "Hello! How can I help you?"), ("Hi", "Hi! Ask me for a sum, a story or something about FlowSpec."),
    ("Hello!", "Hello! What would you like to talk about?"), ("Hi there", "Hi there! What can I do for you?"),
    ("Hey", "Hey! Nice to meet you. What shall we talk about?"), ("Good morning", "Good morning! How can I help you today?"),
    ("Good evening", "Good evening! What can I do for you?"), ("Good night", "Good night, and sleep well!"),
    ("How are you?", "I am fine, thank you. How are you?"), ("How are you today?", "Very well, thank you! And you?"),
    ("I am fine too", "I am glad to hear that. Would you like a story?"), ("Thank you", "You are welcome!"),
    ("Thanks!", "You are welcome. Ask me more if you like."), ("Thanks a lot", "My pleasure!"),
    ("Bye", "Goodbye! It was nice talking to you."), ("Goodbye", "Goodbye! Come back soon."),
    ("Tell me a joke.", "Why did the token cross the pipeline? To get to the next stage!"),
    ("Tell me another joke.", "What did the first stage say to the last one? You always have the last word!"),
    ("Do you know a joke?", "Why was the computer cold? It left its windows open!"),
    ("I am sad.", "I am sorry to hear that. Would you like me to tell you a story?"),
    ("I am bored.", "Then let me tell you a story, or give me a sum to work out!"),
    ("Do you like stories?", "Yes, I love stories. Ask me for one about an animal!"),
    ("Are you clever?", "Not very, I am a small model. But I try hard."),
    ("You are wrong.", "I am sorry. I am a small model and I make mistakes."),
    ("That is wrong.", "I am sorry about that. Please ask me again, perhaps in other words."),
    ("Well done!", "Thank you! Shall we try another one?"), ("I like you.", "That is kind of you. I like talking to you too."),
    ("What time is it?", "I have no clock, so I cannot tell you the time."),
    ("What is the weather like?", "I cannot look outside, so I do not know. I hope it is sunny where you are."),
    ("ok", "Good. What would you like to do next?"), ("yes", "Good! Tell me more."), ("no", "All right. What would you like instead?"),
)


def fact_exchange(rng: random.Random) -> Exchange:
    kind = rng.randrange(8)
    if kind <= 1:
        country = rng.choice(list(CAPITALS))
        city = CAPITALS[country].replace("_", " ")
        form = rng.choice(("What is the capital of {c}?", "What is the capital city of {c}?", "Name the capital of {c}.", "capital of {c}"))
        return Exchange(ask=form.format(c=country), say=f"The capital of {country} is {city}.", domain="facts")
    if kind == 2:
        a, b = rng.choice(OPPOSITES).split()
        if rng.random() < 0.5:
            a, b = b, a
        return Exchange(ask=f"What is the opposite of {a}?", say=f"The opposite of {a} is {b}.", domain="facts")
    if kind == 3:
        animal, sound = rng.choice(SOUNDS).split("=")
        return Exchange(ask=f"What does a {animal} say?", say=f"A {animal} says {sound}.", domain="facts")
    if kind == 4:
        thing, colour = rng.choice(COLOURS).split("=")
        return Exchange(ask=fix_articles(f"What colour is {'the' if thing in ('sky', 'grass', 'sun') else 'a'} {thing}?"),
                        say=f"It is {colour}.", domain="facts")
    if kind == 5:
        i = rng.randrange(7)
        if rng.random() < 0.5:
            return Exchange(ask=f"What day comes after {WEEK[i]}?", say=f"{WEEK[(i + 1) % 7]} comes after {WEEK[i]}.", domain="facts")
        j = rng.randrange(12)
        return Exchange(ask=f"What month comes after {MONTHS[j]}?", say=f"{MONTHS[(j + 1) % 12]} comes after {MONTHS[j]}.", domain="facts")
    if kind == 6:
        n, step = rng.randint(3, 20), rng.choice((1, 1, 1, 2, 5, 10))
        numbers = ", ".join(str(i) for i in range(step, n * step + 1, step)[:20])
        ask = f"Count to {n}." if step == 1 else f"Count to {n * step} in steps of {step}."
        return Exchange(ask=ask, say=numbers + ".", domain="facts")
    word = rng.choice(SPELL)
    return Exchange(ask=f"How do you spell {word}?", say=f"{word}: " + "-".join(word.upper()) + ".", domain="facts")


# ------------------------------------------------------------------------------------------ about FlowSpec

ABOUT: list[tuple[list[str], list[str]]] = [
    (entry["ask"], entry["say"])
    for entry in tomllib.loads(resources.files(__package__).joinpath("about.toml").read_text("utf-8"))["entry"]
]


def reworded(rng: random.Random, question: str) -> str:
    """A question as people type it: sometimes lower case, without its mark, or with a polite start."""
    roll = rng.random()
    if roll < 0.15:
        question = question.lower()
    elif roll < 0.25 and question[-1] in ".?":
        question = question[:-1]
    elif roll < 0.32:
        question = "Please tell me: " + question[0].lower() + question[1:]
    return question


def about_exchange(rng: random.Random, *, held_out: bool = False) -> Exchange:
    while True:
        asks, says = rng.choice(ABOUT)
        ask = rng.choice(asks)
        if (asks.index(ask) == len(asks) - 1 and len(asks) > 3) == held_out:
            return Exchange(ask=reworded(rng, ask) if not held_out else ask, say=rng.choice(says), domain="about")


def greeting_exchange(rng: random.Random) -> Exchange:
    ask, say = rng.choice(GREETINGS)
    return Exchange(ask=reworded(rng, ask), say=say, domain="greetings")


# ----------------------------------------------------------------------------------------- whole dialogues

SYSTEMS = ("You are a helpful assistant.", "You are the FlowSpec demo model.", "Be kind and helpful.", "You are a friendly assistant.")
BRIEF = ("Answer briefly.", "Answer in one short sentence.", "Keep your answers short.")


def draw_exchange(rng: random.Random) -> Exchange:
    roll = rng.random()
    if roll < 0.42:
        return sum_exchange(rng)
    if roll < 0.50:
        return small_problem(rng)
    if roll < 0.66:
        return story_exchange(rng)
    if roll < 0.76:
        return fact_exchange(rng)
    if roll < 0.92:
        return about_exchange(rng)
    return greeting_exchange(rng)


def shortened(answer: str) -> str:
    """The last line's first sentence, which is what a brief answer keeps."""
    return answer.split("\n")[-1].removeprefix("So ").split(". ")[0].rstrip(".!") + "."


def draw_dialogue(rng: random.Random) -> list[dict[str, str]]:
    """A chat of one to four exchanges in the `messages` form of chat templates, now and then with a system
    text."""
    messages: list[dict[str, str]] = []
    brief = rng.random() < 0.05
    if brief:
        messages.append({"role": "system", "content": rng.choice(BRIEF)})
    elif rng.random() < 0.08:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))):
        exchange = draw_exchange(rng)
        say = shortened(exchange.say) if brief else exchange.say
        messages += [{"role": "user", "content": exchange.ask}, {"role": "assistant", "content": say}]
    return messages
