"""Run the guides' audio snippet from a checkout, `from simpletuner.helpers.audio import ...`.

An installed SimpleTuner is imported instead of this folder.
"""

from gracetune.data.audio import load_audio as load_audio
