"""qad_agreement: which of two forms continues an English sentence, decided by grammar alone.

Most templates put a noun of the other number between subject and verb, so that the nearest word misleads. Half of
the items of a template ask for the singular, half for the plural; always answering with one form scores one half.
"""

from __future__ import annotations

import dataclasses

from item import Question

Noun = tuple[str, str]  # singular, plural

PEOPLE: list[Noun] = [
    ("boy", "boys"),
    ("teacher", "teachers"),
    ("farmer", "farmers"),
    ("girl", "girls"),
    ("doctor", "doctors"),
    ("child", "children"),
    ("soldier", "soldiers"),
    ("woman", "women"),
    ("student", "students"),
    ("man", "men"),
]
OTHERS: list[Noun] = [
    ("king", "kings"),
    ("nurse", "nurses"),
    ("lawyer", "lawyers"),
    ("driver", "drivers"),
    ("artist", "artists"),
    ("guest", "guests"),
    ("writer", "writers"),
    ("singer", "singers"),
    ("judge", "judges"),
    ("friend", "friends"),
]
ANIMALS: list[Noun] = [
    ("dog", "dogs"),
    ("bird", "birds"),
    ("horse", "horses"),
    ("cat", "cats"),
    ("mouse", "mice"),
    ("cow", "cows"),
    ("snake", "snakes"),
    ("goat", "goats"),
    ("bear", "bears"),
    ("duck", "ducks"),
]
THINGS: list[Noun] = [
    ("book", "books"),
    ("key", "keys"),
    ("cup", "cups"),
    ("letter", "letters"),
    ("picture", "pictures"),
    ("box", "boxes"),
    ("toy", "toys"),
    ("lamp", "lamps"),
    ("knife", "knives"),
    ("coin", "coins"),
]
PLACES: list[Noun] = [
    ("table", "tables"),
    ("house", "houses"),
    ("garden", "gardens"),
    ("bridge", "bridges"),
    ("tree", "trees"),
    ("tower", "towers"),
    ("wall", "walls"),
    ("chair", "chairs"),
    ("shop", "shops"),
    ("window", "windows"),
]
HEADS: list[Noun] = [
    ("owner", "owners"),
    ("price", "prices"),
    ("name", "names"),
    ("size", "sizes"),
    ("leader", "leaders"),
    ("photo", "photos"),
    ("color", "colors"),
    ("story", "stories"),
    ("map", "maps"),
    ("part", "parts"),
]
MALE: list[Noun] = [
    ("boy", "boys"),
    ("king", "kings"),
    ("man", "men"),
    ("prince", "princes"),
    ("father", "fathers"),
    ("brother", "brothers"),
    ("uncle", "uncles"),
    ("son", "sons"),
    ("actor", "actors"),
    ("monk", "monks"),
]
BE, WAS, HAVE = ("is", "are"), ("was", "were"), ("has", "have")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A sentence up to its verb. {s}: the subject. {o}: a noun of the other number. forms: (singular, plural)."""

    cluster: str
    pattern: str
    subjects: list[Noun]
    forms: tuple[str, str]
    others: list[Noun] = dataclasses.field(default_factory=list)
    shift: int = 0


SUBJECTS = [
    Subject("simple_be", "In the morning the {s}", ANIMALS, BE),
    Subject("simple_was", "Late at night the {s}", PEOPLE, WAS, shift=1),
    Subject("simple_go", "Every day the {s}", OTHERS, ("goes", "go")),
    Subject("near_be", "The {s} near the {o}", PEOPLE, BE, PLACES),
    Subject("behind_was", "The {s} behind the {o}", ANIMALS, WAS, PLACES, 3),
    Subject("with_has", "The {s} with the {o}", PEOPLE, HAVE, ANIMALS, 2),
    Subject("of_be", "The {s} of the {o}", HEADS, BE, PLACES, 1),
    Subject("of_was", "I think the {s} of the {o}", HEADS, WAS, ANIMALS, 4),
    Subject("on_be", "The {s} on the {o}", THINGS, BE, PLACES, 2),
    Subject("under_have", "The {s} under the {o}", THINGS, HAVE, PLACES, 5),
    Subject("beside_want", "The {s} beside the {o}", PEOPLE, ("wants", "want"), ANIMALS, 3),
    Subject("from_need", "The {s} from the {o}", PEOPLE, ("needs", "need"), PLACES, 4),
    Subject("above_look", "The {s} above the {o}", THINGS, ("looks", "look"), PLACES, 1),
    Subject("around_seem", "The {s} around the {o}", ANIMALS, ("seems", "seem"), PLACES, 5),
    Subject("met_be", "The {s} who met the {o}", PEOPLE, BE, OTHERS, 1),
    Subject("helped_has", "The {s} who helped the {o}", PEOPLE, HAVE, OTHERS, 3),
    Subject("saw_was", "The {s} that the {o} saw", ANIMALS, WAS, OTHERS, 2),
    Subject("bought_be", "The {s} that the {o} bought", THINGS, BE, OTHERS, 5),
    Subject("bare_was", "The {s} the {o} found", THINGS, WAS, OTHERS, 6),
    Subject("bare_like", "The {s} the {o} loved", PEOPLE, ("likes", "like"), OTHERS, 7),
    Subject("two_steps", "The {s} by the {o} in the city", PEOPLE, WAS, PLACES, 6),
    Subject("number_of", "The {s} from the room with the {o}", THINGS, BE, PLACES, 3),
    Subject("reflexive", "The {s} who saw the {o} hurt", MALE, ("himself", "themselves"), PLACES, 2),
    Subject("possessive", "The {s} near the {o} hid in", ANIMALS, ("its", "their"), PLACES, 7),
    Subject("near_do", "Today the {s} near the {o}", OTHERS, ("does", "do"), PLACES, 4),
]


def _with_subject(template: Subject) -> list[Question]:
    questions = []
    for i in range(10):
        plural = i % 2
        subject = template.subjects[i][plural]
        other = template.others[(i + template.shift) % len(template.others)][1 - plural] if template.others else ""
        query = template.pattern.format(s=subject, o=other)
        questions.append(Question(template.cluster, query, template.forms[plural], (template.forms[1 - plural],)))
    return questions


# cluster: (singular frame, plural frame, pairs of forms). {n}: a name, so that no prompt occurs twice.
NAMES = ["Anna", "Tom", "Mary", "Peter", "Lucy", "Sam", "Jane", "Paul", "Rose", "Jack"]
FRAMES: dict[str, tuple[str, str, list[Noun]]] = {
    "this_these": ("{n}, please look at this", "{n}, please look at these", ANIMALS),
    "that_those": ("{n} never met that", "{n} never met those", PEOPLE),
    "where_is": ('{n} asked, "Where is the', '{n} asked, "Where are the', THINGS),
    "there_was": ("{n} said there was a big", "{n} said there were some big", PLACES),
    "every_several": ("{n} painted every", "{n} painted several", THINGS),
    "one_two": ("{n} has only one", "{n} has only two", ANIMALS),
    "each_many": ("{n} spoke to each", "{n} spoke to many", OTHERS),
}

# cluster: (query, right, wrong)
PAIRS: dict[str, list[tuple[str, str, str]]] = {
    "each_all": [
        ("Each of the boys", "is", "are"),
        ("All of the boys", "are", "is"),
        ("Each of the cars", "is", "are"),
        ("All of the cars", "are", "is"),
        ("One of the dogs", "is", "are"),
        ("Both of the dogs", "are", "is"),
        ("One of the girls", "is", "are"),
        ("Many of the girls", "are", "is"),
        ("One of my friends", "is", "are"),
        ("Most of my friends", "are", "is"),
    ],
    "pronoun": [
        ("I think that he", "is", "are"),
        ("I think that they", "are", "is"),
        ("We hope that she", "has", "have"),
        ("He hopes that we", "have", "has"),
        ("My mother says it", "was", "were"),
        ("She says you", "were", "was"),
        ("In summer he often", "goes", "go"),
        ("In summer they often", "go", "goes"),
        ("Sometimes she", "wants", "want"),
        ("Sometimes we", "want", "wants"),
    ],
    "pair_of_names": [
        ("Tom", "has", "have"),
        ("Tom and Anna", "have", "has"),
        ("My brother", "was", "were"),
        ("My brother and I", "were", "was"),
        ("The cat", "likes", "like"),
        ("The cat and the dog", "like", "likes"),
        ("The man with the two sons", "is", "are"),
        ("The man and his son", "are", "is"),
        ("Paris, unlike London and Rome,", "is", "are"),
        ("Paris and London", "are", "is"),
    ],
    "modal": [
        ("The little bird can", "sing", "sings"),
        ("My sister will", "come", "comes"),
        ("He should", "take", "takes"),
        ("Every child must", "learn", "learns"),
        ("She would never", "go", "goes"),
        ("It may", "take", "takes"),
        ("The old man could not", "see", "saw"),
        ("The dog might", "run", "ran"),
        ("You cannot", "give", "gave"),
        ("They will soon", "know", "knew"),
    ],
    "do_support": [
        ("She does not", "want", "wants"),
        ("He did not", "go", "went"),
        ("Why did you", "come", "came"),
        ("They did not", "know", "knew"),
        ("The cat does not", "like", "likes"),
        ("Did he", "take", "took"),
        ("It does not", "work", "works"),
        ("We did not", "see", "saw"),
        ("Where does he", "live", "lives"),
        ("I did not", "eat", "ate"),
    ],
    "perfect": [
        ("She has already", "gone", "went"),
        ("He has never", "seen", "saw"),
        ("They have", "taken", "took"),
        ("I had already", "eaten", "ate"),
        ("The window was", "broken", "broke"),
        ("The letter was", "written", "wrote"),
        ("The song had been", "chosen", "chose"),
        ("We have always", "known", "knew"),
        ("The leaves have all", "fallen", "fell"),
        ("He has", "given", "gave"),
    ],
    "progressive": [
        ("The children are", "playing", "played"),
        ("She is still", "sleeping", "slept"),
        ("He was", "running", "ran"),
        ("They were", "singing", "sang"),
        ("The baby is", "crying", "cries"),
        ("I am", "writing", "wrote"),
        ("The dogs were", "eating", "ate"),
        ("We are", "going", "went"),
        ("He keeps", "talking", "talked"),
        ("She enjoys", "reading", "reads"),
    ],
    "infinitive": [
        ("He wants to", "go", "goes"),
        ("She tried to", "open", "opened"),
        ("They began to", "run", "ran"),
        ("It is hard to", "know", "knew"),
        ("We hope to", "see", "saw"),
        ("She made him", "laugh", "laughed"),
        ("I would like to", "eat", "ate"),
        ("He learned to", "swim", "swam"),
        ("Let him", "speak", "spoke"),
        ("The boy refused to", "give", "gave"),
    ],
    "article": [
        ("She saw an", "elephant", "tiger"),
        ("She saw a", "tiger", "elephant"),
        ("He ate an", "apple", "banana"),
        ("He ate a", "banana", "apple"),
        ("I need an", "umbrella", "coat"),
        ("I need a", "coat", "umbrella"),
        ("They live on an", "island", "hill"),
        ("They live on a", "hill", "island"),
        ("It took an", "hour", "week"),
        ("It took a", "week", "hour"),
    ],
    "comparison": [
        ("This tree is taller", "than", "as"),
        ("This tree is as tall", "as", "than"),
        ("Gold is heavier", "than", "as"),
        ("Gold is as heavy", "as", "than"),
        ("My car is faster", "than", "as"),
        ("My car is as fast", "as", "than"),
        ("She is older", "than", "as"),
        ("She is as old", "as", "than"),
        ("He has more books", "than", "as"),
        ("He has as many books", "as", "than"),
    ],
    "reflexive_gender": [
        ("The queen looked at", "herself", "himself"),
        ("The king looked at", "himself", "herself"),
        ("The boy who met the queen hurt", "himself", "herself"),
        ("The girl who met the king hurt", "herself", "himself"),
        ("My uncle taught", "himself", "herself"),
        ("My aunt taught", "herself", "himself"),
        ("The mother of the boy blamed", "herself", "himself"),
        ("The father of the girl blamed", "himself", "herself"),
        ("His wife saw", "herself", "himself"),
        ("Her husband saw", "himself", "herself"),
    ],
}


def questions() -> list[Question]:
    """All items, template after template."""
    result = [question for template in SUBJECTS for question in _with_subject(template)]
    for cluster, (singular, plural, nouns) in FRAMES.items():
        for i, noun in enumerate(nouns):
            query = (singular, plural)[i % 2].format(n=NAMES[i])
            result.append(Question(cluster, query, noun[i % 2], (noun[1 - i % 2],)))
    for cluster, pairs in PAIRS.items():
        result += [Question(cluster, query, right, (wrong,)) for query, right, wrong in pairs]
    return result
