"""The fixed prompts of demos 15 and 20: user messages of several kinds, short, written for this lab.

How much speculation gains depends on the text: a lookup feeds on what repeats, a small draft on what is easy. So the
kinds run from texts to be copied to open questions. Each message has 10 to 60 tokens of SmolLM2's tokenizer, so that
prefill stays cheap, but for the three in `LONGER`. Nothing is sampled: the same prompts, in the same order, each time.
"""

from __future__ import annotations

PARAGRAPH = ("The lighthouse at the end of the harbour was built of granite blocks, each cut by hand and numbered. "
             "Every evening the keeper climbed the one hundred and twelve steps, filled the lamp, wound the clockwork "
             "and wrote the weather into a book. When the lamp was replaced by an electric one, the clockwork stopped, "
             "the keeper moved away, and the book was left open on the table.")

CART = '''class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        result = 0
        for name, price in self.items:
            result = result + price
        return result'''

LONGER = (
    f"Repeat this paragraph word for word:\n\n{PARAGRAPH}",
    f"Summarise this paragraph in two sentences:\n\n{PARAGRAPH}",
    f"Add a method remove(name) to this class and write out the whole class:\n\n{CART}",
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "repeat": (
        LONGER[0],
        "Repeat this sentence three times: The baker opens the shop before the sun is up.",
        "Copy these words exactly: copper, lantern, meadow, copper, lantern, river, copper, lantern, meadow.",
        "Write the line \"I will check the units twice.\" five times, one on each line.",
        "Copy this address, then copy it again:\nMira Holt, 14 Quarry Lane, Northfield, 20817",
        "Fill this list again in the same order: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
        "Say this back to me without any change: red fish, blue fish, old fish, new fish, red fish, blue fish.",
    ),
    "code": (
        LONGER[2],
        "Write a Python function that returns the largest number in a list.",
        "Rename the variable x to total in this code:\n\nx = 0\nfor n in numbers:\n    x = x + n\nprint(x)",
        "Add a docstring to this function:\n\ndef area(width, height):\n    return width * height",
        "Rewrite this loop as a list comprehension:\n\nsquares = []\nfor i in range(10):\n    squares.append(i * i)",
        "Write a C function that swaps two integers through pointers.",
        "Find the bug and write the function again:\n\ndef mean(v):\n    return sum(v) / len(v) - 1",
        "Write a SQL query that counts the orders of each customer.",
        "Write a Python class Stack with the methods push, pop and is_empty.",
    ),
    "prose": (
        LONGER[1],
        "Continue this story: The train left the station without its driver, and nobody noticed until the river.",
        "Write a short letter that thanks a neighbour for watering the plants in summer.",
        "Summarise in one sentence: The mill burned down in spring. The town built it anew, in brick, within a year.",
        "Describe a quiet market square early in the morning, in four sentences.",
        "Rewrite in a formal tone: Sorry, can't make it on Friday, the car broke down again.",
        "Write the first paragraph of a tale about a clock that runs backwards.",
    ),
    "open": (
        "Why does the sky look red in the evening and blue at noon?",
        "What should I think about before I adopt a dog?",
        "How does a refrigerator keep food cold? Explain it to a child.",
        "Why do people forget the names of those they have just met?",
        "What makes a bridge strong enough to carry a train?",
        "Is it better to learn one language well or three a little? Give reasons.",
        "What would change if the Moon were twice as far away?",
    ),
    "lists": (
        "Write a JSON object for a book with the keys title, author, year and pages.",
        "Make a table in Markdown of four fruits with their colour and their taste.",
        "List the numbers from 1 to 30, separated by commas.",
        "Write the multiplication table of seven, from 7 x 1 to 7 x 12.",
        "List ten things to pack for a week of hiking, one on each line.",
        "Turn this into CSV with a header: Ann is 31 and lives in Oslo; Ben is 27 and lives in Rome.",
        "Give me a numbered list of the steps to change a bicycle tyre.",
    ),
    "languages": (
        "Translate into French: The library is closed on Sunday, but the garden is open.",
        "Schreibe drei kurze Sätze über einen Spaziergang im Wald.",
        "Escribe una lista de cinco animales que viven en el mar.",
        "Write the numbers from one to twelve in Italian, one on each line.",
        "Explique en deux phrases pourquoi les feuilles tombent en automne.",
        "How do you say good morning, good night and thank you in Portuguese?",
    ),
    "reasoning": (
        "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Show each step.",
        "Tom is older than Ida, and Ida is older than Max. Who is the youngest, and why?",
        "A tank holds 240 litres and loses 8 litres an hour. After how many hours is it half empty?",
        "Compute 17 + 26 - 9, then double the result. Write each step on its own line.",
    ),
}


def every() -> list[tuple[str, str]]:
    """(kind, text) of all prompts, in their fixed order."""
    return [(kind, text) for kind, texts in PROMPTS.items() for text in texts]
