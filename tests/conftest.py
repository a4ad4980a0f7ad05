"""Settings of every test: hypothesis examples have no deadline, because machines may be busy."""

import hypothesis

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
