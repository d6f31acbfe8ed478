"""qad_phrases: which word ends a common phrase or an everyday sentence, four choices.

Fixed expressions, the words that go together, word formation, and what usually causes or follows what.
"""

from __future__ import annotations

from item import Question, Relation, expand

RELATIONS: list[Relation] = [
    Relation("verb_preposition", "{x}", {
        "It all depends": "on", "This house belongs": "to", "They are longing": "for", "They all laughed": "at",
        "She does not believe": "in", "The team consists": "of", "He suffers": "from", "I fully agree": "with",
        "She listens only": "to", "The river flows": "into",
    }),
    Relation("adjective_preposition", "{x}", {
        "She is afraid": "of", "I am interested": "in", "The town is famous": "for", "This house is far": "from",
        "He is addicted": "to", "The glass is full": "of", "I am proud": "of", "Milk is rich": "in",
        "He is best known": "for", "She is allergic": "to",
    }),
    Relation("pair", "{x} and", {
        "bread": "butter", "salt": "pepper", "black": "white", "ladies": "gentlemen", "thunder": "lightning",
        "bed": "breakfast", "trial": "error", "rock": "roll", "hide": "seek", "supply": "demand",
        "Adam": "Eve", "needle": "thread",
    }),
    Relation("either", "{x} or", {
        "yes": "no", "true": "false", "win": "lose", "dead": "alive", "now": "never", "sink": "swim", "left": "right",
        "rain": "shine", "day": "night", "friend": "foe", "buy": "sell", "start": "finish",
    }),
    Relation("simile", "as {x}", {
        "cold as": "ice", "white as": "snow", "busy as a": "bee", "blind as a": "bat", "light as a": "feather",
        "brave as a": "lion", "sly as a": "fox", "hungry as a": "wolf", "strong as an": "ox", "stubborn as a": "mule",
        "black as": "coal", "old as the": "hills",
    }),
    Relation("proverb", "{x}", {
        "Practice makes": "perfect", "Better late than": "never", "Actions speak louder than": "words",
        "Honesty is the best": "policy", "An apple a day keeps the doctor": "away", "Look before you": "leap",
        "All that glitters is not": "gold", "Two heads are better than": "one", "Rome was not built in a": "day",
        "The early bird catches the": "worm", "Every cloud has a silver": "lining",
        "The pen is mightier than the": "sword",
    }),
    Relation("formula", "{x}", {
        "Once upon a": "time", "They lived happily ever": "after", "Thank you very": "much", "Dear Sir or": "Madam",
        "Merry": "Christmas", "Happy New": "Year", "Long time no": "see", "Please excuse": "me",
        "It was nice to meet": "you", "Last but not": "least", "So far so": "good", "By the": "way",
    }),
    Relation("take_make", "{x}", {
        "Please take a": "seat", "You must pay": "attention", "Everybody can make a": "mistake",
        "First do your": "homework", "In winter you can catch a": "cold", "Always tell the": "truth",
        "Can you keep a": "secret", "Nobody should break the": "law", "May I ask a": "question",
        "Before breakfast he takes a hot": "shower",
    }),
    Relation("verb_object", "{x}", {
        "She rides a": "horse", "He drives a": "car", "He plays the": "piano", "They sail a": "boat",
        "We climb a": "mountain", "She wears a": "dress", "He reads a": "book", "They drink": "water",
        "She sings a": "song", "He digs a": "hole", "We bake a": "cake", "He smokes a": "pipe",
    }),
    Relation("measure", "a {x} of", {
        "bouquet": "flowers", "flock": "sheep", "pair": "shoes", "school": "fish", "deck": "cards",
        "bar": "soap", "sheet": "paper", "glass": "water", "loaf": "bread", "swarm": "bees", "fleet": "ships",
    }),
    Relation("phrasal", "{x} the", {
        "It is dark, so turn on": "light", "It is cold in here, so close": "window",
        "It is loud, so turn down": "music",
        "Breakfast is over, so wash": "dishes", "The grass is high, so mow": "lawn", "You are ill, so see": "doctor",
        "The phone rings, so answer": "phone", "The plants are dry, so get": "water",
        "The floor is dirty, so get": "broom",
        "The baby cries, so hold": "baby",
    }),
    Relation("cause", "{x}", {
        "He drank a lot of water because he was": "thirsty", "She ate a big meal because she was": "hungry",
        "He could hardly keep his eyes open because he was": "tired", "She put on a warm coat because she was": "cold",
        "He went to the doctor because he was": "sick", "The child ran from the dog because he was": "afraid",
        "He hit the table with his fist because he was": "angry", "She yawned all day because she was": "bored",
        "He could not buy the house because he was": "poor", "He came after the bus had left because he was": "late",
    }),
    Relation("effect", "{x}", {
        "The glass fell on the floor and": "broke", "The ice lay in the sun and": "melted",
        "The dry wood was thrown into the fire and": "burned", "The heavy stone fell into the water and": "sank",
        "He told a joke and everyone": "laughed", "The alarm rang and he": "woke", "The seed got water and": "grew",
        "It got very cold and the lake": "froze", "She heard the sad news and": "cried",
        "The ball hit the wall and": "bounced",
    }),
    Relation("shop", "At the {x} you can buy", {
        "bakery": "bread", "butcher": "meat", "bookstore": "books", "pharmacy": "medicine", "flower shop": "flowers",
        "gas station": "gas", "shoe store": "shoes", "toy store": "toys", "cinema": "tickets", "pet shop": "dogs",
    }),
    Relation("purpose", "{x} used for", {
        "A pen is": "writing", "A bed is": "sleeping", "A knife is": "cutting", "A chair is": "sitting",
        "An oven is": "baking", "A pool is": "swimming", "A shovel is": "digging", "A ladder is": "climbing",
        "A gun is": "shooting", "A broom is": "sweeping", "Soap is": "washing",
    }),
    Relation("contrast", "{x} is", {
        "Ice is cold, but fire": "hot", "Snow is white, but coal": "black", "A feather is light, but a stone": "heavy",
        "Sugar is sweet, but a lemon": "sour", "A turtle is slow, but a rabbit": "fast",
        "The day is bright, but the night": "dark", "An elephant is big, but a mouse": "small",
        "A baby is young, but a grandfather": "old", "A rock is hard, but a pillow": "soft",
        "The desert is dry, but the sea": "wet", "A river is long, but a finger": "short",
    }),
    Relation("adverb", "A {x} person does things", {
        "careful": "carefully", "quick": "quickly", "quiet": "quietly", "slow": "slowly", "happy": "happily",
        "brave": "bravely", "gentle": "gently", "lazy": "lazily", "nervous": "nervously", "polite": "politely",
    }),
    Relation("from_noun", "Something with a lot of {x} is", {
        "danger": "dangerous", "power": "powerful", "beauty": "beautiful", "noise": "noisy", "salt": "salty",
        "fame": "famous", "dirt": "dirty", "color": "colorful", "mystery": "mysterious", "value": "valuable",
        "success": "successful", "wind": "windy",
    }),
    Relation("from_adjective", "The quality of being {x} is called", {
        "kind": "kindness", "honest": "honesty", "brave": "bravery", "strong": "strength", "wise": "wisdom",
        "patient": "patience", "loyal": "loyalty", "intelligent": "intelligence", "generous": "generosity",
        "confident": "confidence", "free": "freedom", "creative": "creativity",
    }),
    Relation("negative", "If it is not {x}, it is", {
        "possible": "impossible", "legal": "illegal", "visible": "invisible", "fair": "unfair", "correct": "incorrect",
        "perfect": "imperfect", "known": "unknown", "regular": "irregular", "safe": "unsafe", "complete": "incomplete",
        "usual": "unusual", "direct": "indirect",
    }),
    Relation("sequence", "{x},", {
        "first, second": "third", "morning, noon": "night", "breakfast, lunch": "dinner", "small, medium": "large",
        "past, present": "future", "bronze, silver": "gold", "ready, set": "go", "solid, liquid": "gas",
        "beginning, middle": "end", "Monday, Tuesday": "Wednesday", "spring, summer": "autumn", "good, better": "best",
    }),
    Relation("tag", "{x}", {
        "Your sister is tired, isn't": "she", "The boys are ready, aren't": "they",
        "Your father works here, doesn't": "he",
        "The train was late, wasn't": "it", "We are friends, aren't": "we", "You are Tom, aren't": "you",
        "Your parents left, didn't": "they", "The queen waved, didn't": "she", "The old king died, didn't": "he",
        "The soup was good, wasn't": "it",
    }),
    Relation("body", "{x}", {
        "She nodded her": "head", "He shrugged his": "shoulders", "Please brush your": "teeth",
        "He stuck out his": "tongue",
        "He changed his": "mind", "He raised an": "eyebrow", "Blow your": "nose", "They clapped their": "hands",
        "The story broke her": "heart", "He snapped his": "fingers",
    }),
    Relation("where", "{x}", {
        "Birds fly in the": "sky", "Cars drive on the": "road", "Ships sail on the": "sea",
        "Cakes are baked in an": "oven",
        "Cold milk is kept in the": "fridge", "People keep money in a": "bank", "Flowers grow in a": "garden",
        "A plane lands at the": "airport", "Children learn to read at": "school", "A judge decides in": "court",
        "Films are shown in a": "cinema", "Prisoners sleep in a": "cell",
    }),
    Relation("definition", "{x}", {
        "A child without parents is called an": "orphan", "A doctor for animals is called a": "vet",
        "A room for cooking is called a": "kitchen", "A book that explains words is called a": "dictionary",
        "A building for cars is called a": "garage", "A field where graves are is called a": "cemetery",
        "A bed for a baby is called a": "crib", "A person who does not eat meat is called a": "vegetarian",
        "A room for sleeping is called a": "bedroom", "Land with water all around it is called an": "island",
        "A person who writes poems is called a": "poet",
    }),
    Relation("family", "The {x} is my", {
        "sister of my mother": "aunt", "brother of my father": "uncle", "daughter of my brother": "niece",
        "son of my sister": "nephew", "mother of my mother": "grandmother", "father of my father": "grandfather",
        "son of my uncle": "cousin", "daughter of my parents": "sister", "woman I married": "wife",
        "son of my son": "grandson",
    }),
    Relation("taste", "{x}", {
        "Sugar tastes": "sweet", "Lemons taste": "sour", "Sea water tastes": "salty", "Black coffee tastes": "bitter",
        "Chili peppers taste": "hot", "Honey tastes": "sweet", "Vinegar tastes": "sour",
        "Chocolate cake tastes": "sweet",
    }),
    Relation("agent", "Someone who {x} is called a", {
        "bakes bread": "baker", "teaches children": "teacher", "drives a bus": "driver", "sings songs": "singer",
        "paints pictures": "painter", "writes novels": "writer", "swims fast": "swimmer", "dances well": "dancer",
        "hunts deer": "hunter", "sails ships": "sailor", "runs races": "runner", "robs banks": "robber",
    }),
    Relation("need", "To {x}, you need", {
        "pay the rent": "money", "bake bread": "flour", "fly a kite": "wind", "build a snowman": "snow",
        "read at night": "light", "make wine": "grapes", "make cheese": "milk", "build a sandcastle": "sand",
        "drive a truck": "gas", "sew a dress": "cloth",
    }),
    Relation("group", "Red and blue are colors. {x} are", {
        "Dogs and cats": "animals", "Apples and pears": "fruits", "Roses and tulips": "flowers",
        "Hammers and saws": "tools", "Cars and trucks": "vehicles", "Monday and Friday": "days",
        "Two and seven": "numbers", "Paris and Rome": "cities", "France and Spain": "countries",
        "May and June": "months", "Shirts and trousers": "clothes", "Tennis and golf": "sports",
    }),
    Relation("degree", "The {x}, the", {
        "more you practice, the better you get; the less you practice": "worse",
        "higher the price, the fewer buyers; the lower the price": "more",
        "closer you stand, the bigger it looks; the farther you stand": "smaller",
        "older the wine, the more it costs; the younger the wine": "less",
        "faster you walk, the sooner you arrive; the slower you walk": "later",
        "warmer the day, the longer we stay; the colder the day": "shorter",
    }),
]  # fmt: skip


def questions() -> list[Question]:
    """All items, template after template."""
    return expand(RELATIONS)
