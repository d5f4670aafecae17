"""What people write down about a run: tags to find it by, and a note."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import FileError
from keyhole.live.form import InvalidForm
from keyhole.runs.folders import replace_files

REMARKS = "remarks.json"  # beside the files of the run
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 8, 32, 2000


@dataclass(frozen=True)
class Remarks:
    """Tags and a note, as they were written."""

    tags: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, given: Any) -> Remarks:
        """What a page sent, tags as one text with commas between them; InvalidForm says what is wrong with it."""
        if not isinstance(given, Mapping) or not set(given) <= {"tags", "note"}:
            raise InvalidForm({"note": "an object of tags and a note"})
        tags, note = given.get("tags", ""), given.get("note", "")
        if not isinstance(tags, str) or not isinstance(note, str):
            raise InvalidForm({"tags" if isinstance(note, str) else "note": "a text"})
        each = tuple(dict.fromkeys(" ".join(tag.split()) for tag in tags.split(",") if tag.strip()))
        if len(each) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in each):
            raise InvalidForm({"tags": f"at most {MOST_TAGS} with commas between them, of {LONGEST_TAG} characters"})
        if len(note) > LONGEST_NOTE:
            raise InvalidForm({"note": f"at most {LONGEST_NOTE:,} characters"})
        return cls(each, note.strip())

    @classmethod
    def load(cls, folder: Path) -> Remarks:
        """What was written down of the run in a folder; FileError where the file makes no sense."""
        path = folder / REMARKS
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls.of({"tags": ",".join(found["tags"]), "note": found["note"]})
        except (ValueError, KeyError, TypeError, InvalidForm) as error:
            raise FileError(f"{REMARKS} is damaged ({error})") from error

    def save(self, folder: Path) -> None:
        """Write them into the folder of a run."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        replace_files(folder, {REMARKS: lambda path: path.write_text(text, encoding="utf-8")})
