"""Techniques put together: from a model and a mesh to an engine that trains it.

Order of reading: `recipe` (one description of all that is put together), `together` (the order in which techniques are
applied, in one file), `building` (from the one to the other), `recipe_rules` (what does not go together, whatever the
model), `recipe_text` (as TOML), `recipe_why` (what each line does to a model), `recipe_budget` (the fewest recomputed
blocks for a budget), `training` (the engine), `division` (the model in stages, weights that two of them
share), `initial_values` (a rank makes its own part), `refused` (what does not go together, with numbers), `batch` (the
same rows on ranks that share them). `launch` runs a function on the ranks of a mesh; `dry` asks any rank of a mesh that
nobody has.
"""

from .building import build, dry_recipe
from .dry import DryRank, dry_rank, worst_rank
from .launch import launch
from .recipe import Recipe
from .together import together
from .training import ParallelEngine

__all__ = ["DryRank", "ParallelEngine", "Recipe", "build", "dry_rank", "dry_recipe", "launch", "together", "worst_rank"]
