"""python run.py RECIPE OUT [KEY=VALUE ...]: is QAD's gain larger than what another training seed does?"""

import sys

import qad

recipe, out, *overrides = sys.argv[1:]
runs = []
for seed in (0, 1, 2):
    asked = qad.load_recipe(recipe, [*overrides, f"train.seed={seed}"])
    runs.append(qad.run(asked, f"{out}/seed-{seed}").folder / "measure")
found = qad.compare([runs[0] / "bf16", runs[0] / "ptq", *(run / "qad" for run in runs)], f"{out}/comparison")
for trained in found.comparison.training_seeds["qad"]:
    print(trained.seed, trained.values)
