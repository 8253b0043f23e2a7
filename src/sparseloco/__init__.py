"""sparseloco: volunteers train one language model together over the ordinary internet.

Four folders, one direction of knowledge: `node` uses the other three, `bootstrap` uses `protocol`, and `protocol` and
`compression` know nothing of each other. Importing this package does nothing.
"""

__version__ = "0.1.0"
