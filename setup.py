"""The description on PyPI: the README with absolute links. All else is in ``setup.cfg``."""

import re
from pathlib import Path

from setuptools import setup

ADDRESS = "https://github.com/joinables/joinables"
README = Path(__file__).with_name("README.md").read_text()

text = re.sub(r"(!\[[^]]*\])\((?!https?:)", rf"\1({ADDRESS}/raw/main/", README)
setup(long_description=re.sub(r"\]\((?!https?:|#)", f"]({ADDRESS}/blob/main/", text))
