"""The text that the bench model's tokenizer is trained on, and that its text prompts are cut from.

Only two things are asked of it: enough different words for some 760 merges, and that it never changes, because the
model's recipe hash covers it. A change here makes a new model in the cache, and new figures in ``model.py``.
"""

from typing import Final

TEXT: Final = """\
A language model reads its prompt once. For every token and for every layer it leaves behind two small vectors, a key
and a value, and each later token looks back at all of them. Keeping these vectors is what makes generation cheap: the
second token costs one row of arithmetic instead of the whole page again. The store that holds them is called the key
value cache, and in a busy server it is the largest thing in memory after the weights themselves.

Reading and writing are different kinds of work. Reading a long prompt fills the machine with large matrix products and
is bound by arithmetic. Writing the answer touches every weight for each single token and is bound by memory bandwidth.
When both share one machine, a long prompt that arrives in the middle of somebody's answer makes that answer stutter.
So people separate them: some machines only read, others only write, and the cache travels between the two.

The journey has to be quick, quiet and exact. Quick, since the reader of the answer is waiting for the first word.
Quiet, because neither side may stop its own work to carry parcels. Exact, because a block that lands in the wrong
place does not raise an error. It produces a fluent, confident, wrong sentence, and nobody notices until much later.
That is why a test must use a model whose answer depends on every block, and why it compares numbers, not impressions.

Imagine a post office with numbered shelves. The sender knows which drawers hold the letters of one customer. The
receiver chooses which of its own empty drawers will take them, writes the list down, and sends the list ahead. Then
a porter who belongs to neither desk carries each letter from drawer to drawer while both clerks go on serving other
people. When the last letter has arrived the porter rings a bell. If the customer leaves early, the list is revoked,
and no drawer is handed to anyone else before the porter has confirmed that his hands are empty.

Networks lose things, processes die, clocks disagree, and messages come twice or late. Each of these has a name and a
rule. A lease says how long a promise holds, and the one who holds it counts from the moment of asking. A generation
number says which attempt a letter belongs to. A fence says that everything before this point has truly finished.
None of the rules is difficult; what is difficult is to keep all of them at the same time, at full speed, for months.

Some words for the vocabulary: apple, bridge, candle, daylight, engine, forest, garden, harbour, island, journey,
kitchen, lantern, mountain, needle, orchard, paper, quarry, river, silver, thunder, umbrella, village, window, yellow,
zebra; Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday; north, south, east, west; first, second, third,
fourth, fifth, sixth, seventh, eighth, ninth, tenth; red, orange, green, blue, violet, black, white, brown, grey.
What is the capital of France? How many blocks are there? Why did the transfer fail? Who wrote this, when, and where?
0 1 2 3 4 5 6 7 8 9 10 11 12 16 24 31 32 33 64 100 127 128 129 256 300 512 1000 1024 2000 2048 4000 4096 6000 8192
def move(source, sink, blocks): return [(source + block * stride, sink + block * stride, length) for block in blocks]
{"model": "kvxfer", "messages": [{"role": "user", "content": "Hello, world!"}], "stream": true, "max_tokens": 16}
"""
