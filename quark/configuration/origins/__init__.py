"""Where the settings of a configuration have their values from, whoever put it together.

`finding` asks what is handed to `start_run`: layers of ours, a parser, Hydra (`hydra_configs`),
OpenMMLab (`openmmlab_configs`), and what the command line says in so many words. `keeping` makes
of it what is kept with the run: redacted, and of bounded size. Nothing here imports one of these
libraries, or evaluates a file.
"""
