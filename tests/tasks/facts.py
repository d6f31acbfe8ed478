"""qad_facts: everyday knowledge, four choices. Wrong answers are right answers of the same template's other items."""

from __future__ import annotations

from item import Question, Relation, expand

RELATIONS: list[Relation] = [
    Relation("capital", "The capital of {x} is", {
        "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
        "Russia": "Moscow", "Austria": "Vienna", "Egypt": "Cairo", "Ireland": "Dublin", "Greece": "Athens",
        "Portugal": "Lisbon", "Cuba": "Havana",
    }),
    Relation("country_of_city", "The city of {x} is in", {
        "Munich": "Germany", "Milan": "Italy", "Barcelona": "Spain", "Lyon": "France", "Osaka": "Japan",
        "Mumbai": "India", "Shanghai": "China", "Toronto": "Canada", "Sydney": "Australia", "Manchester": "England",
        "Krakow": "Poland",
    }),
    Relation("continent", "The country of {x} lies in", {
        "Kenya": "Africa", "Thailand": "Asia", "Belgium": "Europe", "Nigeria": "Africa", "Vietnam": "Asia",
        "Denmark": "Europe", "Ghana": "Africa", "Nepal": "Asia", "Austria": "Europe", "Zambia": "Africa",
    }, ("Australia",)),
    Relation("language", "In {x}, the main language is", {
        "Brazil": "Portuguese", "Mexico": "Spanish", "Austria": "German", "Egypt": "Arabic", "Japan": "Japanese",
        "Poland": "Polish", "Australia": "English", "Sweden": "Swedish", "Italy": "Italian", "Greece": "Greek",
    }),
    Relation("currency", "The money used in {x} is called the", {
        "Japan": "yen", "Mexico": "peso", "Britain": "pound", "Germany": "euro", "Russia": "ruble", "Canada": "dollar",
        "Sweden": "krona", "Switzerland": "franc", "Austria": "euro",
    }),
    Relation("landmark", "You can see {x} in", {
        "the Eiffel Tower": "Paris", "Big Ben": "London", "the Colosseum": "Rome", "the Brandenburg Gate": "Berlin",
        "the Kremlin": "Moscow", "the Acropolis": "Athens", "the White House": "Washington", "the Louvre": "Paris",
        "Buckingham Palace": "London", "the Vatican": "Rome",
    }, ("Madrid",)),
    Relation("people_of", "A person who was born in France is French. A person who was born in {x} is", {
        "Spain": "Spanish", "Germany": "German", "Italy": "Italian", "Poland": "Polish", "Ireland": "Irish",
        "Greece": "Greek", "Sweden": "Swedish", "Turkey": "Turkish", "Russia": "Russian", "China": "Chinese",
    }),
    Relation("month_after", "The month that comes right after {x} is", {
        "January": "February", "February": "March", "March": "April", "April": "May", "May": "June", "June": "July",
        "July": "August", "August": "September", "September": "October", "October": "November",
        "November": "December", "December": "January",
    }),
    Relation("day_after", "The day that comes right after {x} is", {
        "Monday": "Tuesday", "Tuesday": "Wednesday", "Wednesday": "Thursday", "Thursday": "Friday",
        "Friday": "Saturday", "Saturday": "Sunday", "Sunday": "Monday",
    }),
    Relation("next_number", "Let us count: {x},", {
        "one, two": "three", "two, three": "four", "three, four": "five", "four, five": "six", "five, six": "seven",
        "six, seven": "eight", "seven, eight": "nine", "eight, nine": "ten", "nine, ten": "eleven",
        "ten, eleven": "twelve",
    }),
    Relation("sum", "One plus one is two. {x} is", {
        "Two plus one": "three", "Two plus two": "four", "Three plus two": "five", "Three plus three": "six",
        "Five plus five": "ten", "Four plus four": "eight", "Five plus two": "seven", "Six plus three": "nine",
        "One plus three": "four", "Six plus one": "seven",
    }),
    Relation("count", "The number of {x} is", {
        "legs of a spider": "eight", "legs of a horse": "four", "days in a week": "seven", "months in a year": "twelve",
        "fingers on one hand": "five", "wheels of a bicycle": "two", "sides of a triangle": "three",
        "corners of a square": "four", "legs of an ant": "six", "players in a soccer team": "eleven",
        "continents on Earth": "seven", "eyes of a human": "two",
    }),
    Relation("opposite", "The opposite of {x} is", {
        "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "young": "old", "rich": "poor",
        "wet": "dry", "fast": "slow", "open": "closed", "early": "late", "full": "empty", "hard": "soft",
        "black": "white",
    }),
    Relation("synonym", "Another word for {x} is", {
        "big": "large", "quick": "fast", "glad": "happy", "sick": "ill", "begin": "start", "speak": "talk",
        "shut": "close", "angry": "mad", "rich": "wealthy", "clever": "smart", "tired": "sleepy", "home": "house",
    }),
    Relation("plural", "One {x}, two", {
        "mouse": "mice", "foot": "feet", "child": "children", "man": "men", "woman": "women", "tooth": "teeth",
        "leaf": "leaves", "wolf": "wolves", "person": "people", "city": "cities", "box": "boxes", "goose": "geese",
    }),
    Relation("past", "Today they {x}, yesterday they", {
        "go": "went", "see": "saw", "eat": "ate", "run": "ran", "buy": "bought", "sing": "sang", "write": "wrote",
        "teach": "taught", "come": "came", "speak": "spoke", "sleep": "slept", "think": "thought",
    }),
    Relation("superlative", "tall, taller, tallest; {x},", {
        "good, better": "best", "bad, worse": "worst", "big, bigger": "biggest", "small, smaller": "smallest",
        "fast, faster": "fastest", "old, older": "oldest", "hot, hotter": "hottest", "strong, stronger": "strongest",
        "cheap, cheaper": "cheapest", "near, nearer": "nearest",
    }),
    Relation("female", "Man is to woman as {x} is to", {
        "king": "queen", "father": "mother", "son": "daughter", "brother": "sister", "uncle": "aunt", "boy": "girl",
        "husband": "wife", "prince": "princess", "actor": "actress",
    }),
    Relation("young_animal", "A young {x} is called a", {
        "dog": "puppy", "cat": "kitten", "sheep": "lamb", "cow": "calf", "bear": "cub", "horse": "foal",
        "lion": "cub", "hen": "chick", "deer": "fawn",
    }),
    Relation("sound", "The loud sound that a {x} makes is called a", {
        "dog": "bark", "lion": "roar", "snake": "hiss", "bee": "buzz", "wolf": "howl", "duck": "quack", "cat": "meow",
        "pig": "grunt", "bell": "ring", "bomb": "blast",
    }),
    Relation("product", "People get {x} from a", {
        "milk": "cow", "eggs": "chicken", "honey": "bee", "apples": "tree", "bread": "bakery", "water": "well",
        "medicine": "pharmacy", "books": "library", "cash": "bank",
    }),
    Relation("color", "The color of {x} is", {
        "fresh grass": "green", "the clear sky": "blue", "snow": "white", "coal": "black", "blood": "red",
        "a ripe banana": "yellow", "a carrot": "orange", "milk": "white", "a ripe tomato": "red", "chocolate": "brown",
    }),
    Relation("material", "A {x} is usually made of", {
        "window": "glass", "newspaper": "paper", "tire": "rubber", "candle": "wax", "sweater": "wool",
        "wooden table": "wood", "snowman": "snow", "sword": "steel", "brick": "clay", "wedding ring": "gold",
    }),
    Relation("tool", "To {x}, you use a", {
        "cut bread": "knife", "eat soup": "spoon", "drive a nail": "hammer", "sweep the floor": "broom",
        "write a letter": "pen", "see far away stars": "telescope", "take a photo": "camera", "open a lock": "key",
        "dig a hole": "shovel", "stay dry in the rain": "umbrella",
    }),
    Relation("sense", "We {x} with our", {
        "see": "eyes", "hear": "ears", "smell flowers": "nose", "walk": "feet", "chew": "teeth", "think": "brain",
        "kneel": "knees", "taste": "tongue", "hold a pen": "fingers",
    }),
    Relation("wear", "You wear {x} on your", {
        "a hat": "head", "shoes": "feet", "a ring": "finger", "a scarf": "neck", "a watch": "wrist", "socks": "feet",
        "a bracelet": "wrist", "earrings": "ears", "a crown": "head", "a backpack": "back",
    }),
    Relation("profession", "The person who {x} is a", {
        "flies airplanes": "pilot", "grows crops": "farmer", "treats sick people": "doctor", "teaches in a school":
        "teacher", "repairs teeth": "dentist", "cooks in a restaurant": "chef", "puts out fires": "firefighter",
        "defends people in court": "lawyer", "catches fish": "fisherman", "catches criminals": "detective",
    }),
    Relation("workplace", "A {x} usually works in a", {
        "teacher": "school", "nurse": "hospital", "judge": "court", "waiter": "restaurant", "librarian": "library",
        "priest": "church", "farmer": "field", "banker": "bank", "scientist": "laboratory", "baker": "bakery",
    }),
    Relation("kind", "The {x} is a kind of", {
        "rose": "flower", "salmon": "fish", "sparrow": "bird", "oak": "tree", "carrot": "vegetable", "violin":
        "instrument", "hammer": "tool", "poodle": "dog", "banana": "fruit", "mosquito": "insect", "sofa": "furniture",
    }),
    Relation("unit", "{x} make one", {
        "Sixty seconds": "minute", "Sixty minutes": "hour", "Seven days": "week", "Twelve months": "year",
        "Ten years": "decade", "One hundred years": "century", "Twenty-four hours": "day", "Twelve inches": "foot",
        "One hundred cents": "dollar", "Three feet": "yard",
    }),
    Relation("season", "In England, the month of {x} is in the", {
        "December": "winter", "July": "summer", "April": "spring", "October": "autumn", "January": "winter",
        "August": "summer", "May": "spring", "November": "autumn",
    }),
    Relation("writer", "The author of {x} is", {
        "Hamlet": "Shakespeare", "Oliver Twist": "Dickens", "Harry Potter": "Rowling", "The Hobbit": "Tolkien",
        "War and Peace": "Tolstoy", "The Odyssey": "Homer", "Romeo and Juliet": "Shakespeare",
        "Tom Sawyer": "Twain", "Pride and Prejudice": "Austen", "Animal Farm": "Orwell",
    }),
    Relation("scientist", "{x}", {
        "The theory of relativity was published by Albert": "Einstein",
        "The law of gravity was found by Isaac": "Newton",
        "The theory of evolution was published by Charles": "Darwin",
        "Radium was discovered by Marie": "Curie",
        "The light bulb was improved by Thomas": "Edison",
        "The moons of Jupiter were first seen by Galileo": "Galilei",
        "Penicillin was discovered by Alexander": "Fleming",
        "The telephone was invented by Alexander Graham": "Bell",
        "The laws of heredity were found by Gregor": "Mendel",
        "The steam engine was improved by James": "Watt",
    }),
    Relation("symbol", "The chemical symbol {x} stands for", {
        "H": "hydrogen", "O": "oxygen", "C": "carbon", "Fe": "iron", "Au": "gold", "Ag": "silver", "N": "nitrogen",
        "He": "helium", "Na": "sodium", "Cu": "copper",
    }),
    Relation("planet", "{x} is", {
        "The planet closest to the sun": "Mercury", "The planet we live on": "Earth", "The red planet": "Mars",
        "The largest planet": "Jupiter", "The planet famous for its rings": "Saturn",
        "The second planet from the sun": "Venus", "The planet farthest from the sun": "Neptune",
    }),
    Relation("river", "The {x} is a river in", {
        "Nile": "Egypt", "Thames": "England", "Seine": "France", "Ganges": "India", "Mississippi": "America",
        "Yangtze": "China", "Amazon": "Brazil", "Tiber": "Italy", "Elbe": "Germany", "Volga": "Russia",
    }),
    Relation("home", "The {x} lives in the", {
        "whale": "ocean", "camel": "desert", "monkey": "jungle", "polar bear": "Arctic", "duck": "pond",
        "earthworm": "soil", "queen": "palace", "farmer": "countryside",
    }),
]  # fmt: skip


def questions() -> list[Question]:
    """All items, template after template."""
    return expand(RELATIONS)
