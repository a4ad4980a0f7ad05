"""What holds for every test: on a busy machine an example may take as long as it takes."""

import hypothesis

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
