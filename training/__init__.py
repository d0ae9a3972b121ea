"""Training: a map of its files. Each imports only what is below it in this list.

commands, flags   the commands train, evaluate, export, import and experiment
experiments/      those of the papers: words.py is what copy and duplication share, learning.py the
                  training, lengths.py time and memory by length, record.py the folder of results
plan              what flags, preset, pictures and a checkpoint amount to; reads no file
loop              one sitting of a run: steps, saves, evaluations; with log, progress and plots
class_agreement   how often a CNN recognises the class of what a model draws
export            provenance, model card, sample grids, and the checkpoint for distribution
automatic         --preset auto: looks at pictures and brings them to one size; with palette
batches, run      what a step learns from; settings and state, with init (how --init fills weights),
                  workers (several processes), precision and files
evaluate, calibrate, look, masks   measures, and the masks of pictures to complete
avatars, letters  programs that make data sets
datasets          which data a folder holds; with folders, idx and readers
"""
