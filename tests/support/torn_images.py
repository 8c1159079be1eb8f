"""Images of which some cannot be read, and somebody who listens to what is said about it."""

from co2.data.source import BadImage, ImageSource
from co2.evaluation.progress import Progress


class Torn(ImageSource):
    """The images of another source, but for some."""

    def __init__(self, source, bad):
        self.source, self.bad = source, bad
        self.name, self.labels, self.classes = source.name, source.labels, source.classes

    def __len__(self):
        return len(self.source)

    def image(self, index):
        if index in self.bad:
            raise BadImage("torn")
        return self.source.image(index)

    def describe(self, index):
        return f"picture {index}"


class Listener(Progress):
    """Remembers the lines that stay."""

    def __init__(self):
        self.lines = []

    def say(self, words):
        self.lines.append(words)
