# ruff: noqa: SIM905
"""The demo model's short facts, as tables."""

import random

CAPITALS = dict(
    line.split(": ")
    for line in """France: Paris
Germany: Berlin
Italy: Rome
Spain: Madrid
Portugal: Lisbon
the United Kingdom: London
Ireland: Dublin
the Netherlands: Amsterdam
Belgium: Brussels
Luxembourg: Luxembourg
Switzerland: Bern
Austria: Vienna
Denmark: Copenhagen
Norway: Oslo
Sweden: Stockholm
Finland: Helsinki
Iceland: Reykjavik
Poland: Warsaw
the Czech Republic: Prague
Slovakia: Bratislava
Hungary: Budapest
Romania: Bucharest
Bulgaria: Sofia
Greece: Athens
Croatia: Zagreb
Slovenia: Ljubljana
Serbia: Belgrade
Albania: Tirana
Ukraine: Kyiv
Estonia: Tallinn
Latvia: Riga
Lithuania: Vilnius
Russia: Moscow
Turkey: Ankara
Egypt: Cairo
Morocco: Rabat
Algeria: Algiers
Tunisia: Tunis
Kenya: Nairobi
Ethiopia: Addis Ababa
Nigeria: Abuja
Ghana: Accra
Senegal: Dakar
Uganda: Kampala
Japan: Tokyo
China: Beijing
South Korea: Seoul
India: New Delhi
Nepal: Kathmandu
Bhutan: Thimphu
Pakistan: Islamabad
Bangladesh: Dhaka
Thailand: Bangkok
Vietnam: Hanoi
Malaysia: Kuala Lumpur
Indonesia: Jakarta
the Philippines: Manila
Mongolia: Ulaanbaatar
Iran: Tehran
Iraq: Baghdad
Saudi Arabia: Riyadh
Jordan: Amman
Lebanon: Beirut
the United States: Washington, D.C.
Canada: Ottawa
Mexico: Mexico City
Cuba: Havana
Jamaica: Kingston
Guatemala: Guatemala City
Costa Rica: San José
Panama: Panama City
Colombia: Bogotá
Venezuela: Caracas
Ecuador: Quito
Peru: Lima
Chile: Santiago
Argentina: Buenos Aires
Uruguay: Montevideo
Paraguay: Asunción
Brazil: Brasília
Australia: Canberra
New Zealand: Wellington""".splitlines()
)

COUNTRY_ALIASES = {
    "the United Kingdom": ["the UK", "Great Britain"],
    "the United States": ["the USA", "the US", "America"],
    "the Netherlands": ["Holland"],
    "the Czech Republic": ["Czechia"],
    "South Korea": ["Korea"],
}

OPPOSITES = [
    tuple(pair.split("-"))
    for pair in (
        "hot-cold big-small up-down fast-slow good-bad day-night light-dark old-new open-closed full-empty high-low "
        "happy-sad long-short wet-dry hard-soft left-right in-out on-off early-late rich-poor strong-weak loud-quiet "
        "clean-dirty near-far first-last true-false begin-end win-lose push-pull start-stop yes-no always-never "
        "thick-thin wide-narrow deep-shallow sweet-sour black-white front-back inside-outside above-below before-after "
        "buy-sell give-take question-answer summer-winter north-south east-west sunrise-sunset friend-enemy love-hate "
        "warm-cool easy-difficult cheap-expensive brave-afraid awake-asleep smooth-rough safe-dangerous "
        "same-different more-less"
    ).split()
]

COLOURS = [
    ("the sky", "The sky is blue on a clear day."),
    ("grass", "Grass is green."),
    ("snow", "Snow is white."),
    ("the sun", "The sun looks yellow from the earth."),
    ("a banana", "A ripe banana is yellow."),
    ("a tomato", "A ripe tomato is red."),
    ("blood", "Blood is red."),
    ("coal", "Coal is black."),
    ("milk", "Milk is white."),
    ("an orange", "An orange is orange."),
    ("a carrot", "A carrot is orange."),
    ("a lemon", "A lemon is yellow."),
    ("the sea", "The sea is blue or green."),
    ("chocolate", "Chocolate is brown."),
    ("the night sky", "The night sky is black with bright stars."),
    ("a strawberry", "A ripe strawberry is red."),
    ("a polar bear", "A polar bear is white."),
    ("a raven", "A raven is black."),
    ("gold", "Gold is yellow and shines."),
    ("silver", "Silver is grey and shines."),
    ("a frog", "Most frogs are green."),
    ("a fire truck", "A fire truck is red."),
    ("the chairlift", "The chairlift is red, so you can see it in the snow."),
    ("a lavender flower", "A lavender flower is purple."),
    ("a cucumber", "A cucumber is green."),
    ("an emerald", "An emerald is green."),
    ("a ruby", "A ruby is red."),
    ("a flamingo", "A flamingo is pink."),
    ("an elephant", "An elephant is grey."),
    ("wood", "Wood is brown."),
]

MIXES = [
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
    ("red", "green", "brown"),
]

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]

# (phrasings, answer)
CALENDAR: list[tuple[tuple[str, ...], str]] = [
    (
        ("How many days are in a week?", "How many days does a week have?", "How many days are there in a week?"),
        "A week has seven days.",
    ),
    (
        ("How many months are in a year?", "How many months does a year have?", "How many months are there in a year?"),
        "A year has twelve months.",
    ),
    (
        ("How many days are in a year?", "How many days does a year have?", "How many days are there in a year?"),
        "A year has 365 days, and a leap year has 366.",
    ),
    (
        ("How many hours are in a day?", "How many hours does a day have?", "How many hours are there in a day?"),
        "A day has 24 hours.",
    ),
    (
        ("How many minutes are in an hour?", "How many minutes does an hour have?"),
        "An hour has 60 minutes.",
    ),
    (
        ("How many seconds are in a minute?", "How many seconds does a minute have?"),
        "A minute has 60 seconds.",
    ),
    (
        ("What are the days of the week?", "List the days of the week.", "Name the days of the week."),
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("What are the months of the year?", "List the months of the year.", "Name the months.", "List the months."),
        "The months of the year are January, February, March, April, May, June, July, August, September, October, "
        "November and December.",
    ),
    (
        ("What are the seasons?", "Name the seasons.", "How many seasons are there?", "List the four seasons."),
        "There are four seasons: spring, summer, autumn and winter.",
    ),
    (
        ("What is the first month of the year?", "Which month is the first?"),
        "January is the first month of the year.",
    ),
    (
        ("What is the last month of the year?", "Which month is the last?"),
        "December is the last month of the year.",
    ),
    (
        ("What are the primary colours?", "Name the primary colours.", "What are the primary colors?"),
        "The primary colours are red, yellow and blue.",
    ),
    (
        (
            "What are the colours of the rainbow?",
            "Name the colours of the rainbow.",
            "What colours does a rainbow have?",
        ),
        "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
    ),
    (
        (
            "What is the highest mountain?",
            "What is the highest mountain in the world?",
            "Which mountain is the highest?",
        ),
        "Mount Everest is the highest mountain in the world. It is 8,849 metres high.",
    ),
    (
        ("What is the highest mountain in the Alps?", "Which mountain is the highest in the Alps?"),
        "Mont Blanc is the highest mountain in the Alps. It is about 4,808 metres high.",
    ),
]

# (phrasings, answer); every phrasing is used as it stands
FIXED: list[tuple[tuple[str, ...], str]] = [
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hey there!",
            "Good morning!",
            "Good evening!",
            "Hi there",
            "Greetings!",
        ),
        "Hello! I am the Chairlift demo model. Ask me about batching, mountains, capitals or small sums.",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Introduce yourself.",
            "What is your name?",
            "Are you a language model?",
            "Tell me about yourself.",
            "Who am I talking to?",
            "What's your name?",
        ),
        "I am a small demo model that ships with Chairlift. I have about three million weights and was trained in a "
        "few minutes, so I know only a few things. I like mountains and full batches.",
    ),
    (
        (
            "What can you do?",
            "What do you know?",
            "What can I ask you?",
            "How can you help me?",
            "Help",
            "Help me.",
            "What can you tell me?",
            "What are your abilities?",
        ),
        "I can explain batching and inference serving, tell short stories about mountains, name capitals, colours, "
        "days and months, and do small sums. Try: What is continuous batching?",
    ),
    (
        ("How are you?", "How are you doing?", "How do you do?", "How is it going?", "Are you well?"),
        "I am fine, thank you. All my chairs are moving and the sky is clear.",
    ),
    (
        (
            "Thank you!",
            "Thanks!",
            "Thanks a lot!",
            "Thank you very much.",
            "Great, thanks!",
            "Thanks",
            "Nice, thank you.",
        ),
        "You are welcome! Ask me something else whenever you like.",
    ),
    (
        ("Goodbye!", "Bye!", "See you later!", "Bye bye", "Good night!", "See you!", "Goodbye"),
        "Goodbye! Enjoy the ride down.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?", "How were you made?"),
        "I was trained from scratch by a script in the Chairlift repository. All the text that I learned from was "
        "written by that script, and the training took a few minutes on two processor cores.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How many weights do you have?", "How large are you?"),
        "I have about three million weights. That is a thousand times fewer than a small chat model, so please be "
        "kind.",
    ),
    (
        ("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "Say something funny."),
        "Why did the request take the chairlift? Because the cable car was still waiting for a full batch.",
    ),
    (
        (
            "Why is batching important?",
            "Why does batching matter?",
            "Why should I batch requests?",
            "Why do servers use batching?",
            "What is batching good for?",
        ),
        "Batching matters because reading the weights of a model is slow. One request alone pays for the whole "
        "reading, and a batch shares it. With sixteen requests in a batch, a server often does ten times as much "
        "work per second.",
    ),
    (
        (
            "What batching strategies are there?",
            "Which batching strategies does Chairlift have?",
            "List the batching strategies.",
            "Which batching strategies exist?",
            "What kinds of batching are there?",
            "What are the batching strategies?",
        ),
        "There are four strategies: none, static, dynamic and continuous. With none, requests run one at a time. "
        "Static waits for a full batch, like a cable car. Dynamic leaves when it is full or when its time is up, "
        "like a gondola. Continuous never stops, like a chairlift.",
    ),
    (
        (
            "Why is it called Chairlift?",
            "Why the name Chairlift?",
            "Where does the name Chairlift come from?",
            "Why is the server called Chairlift?",
        ),
        "The name comes from the mountains. A cable car waits until it is full, a gondola leaves when its time is "
        "up, and a chairlift never stops. Continuous batching is the chairlift: requests get on and off at every "
        "step.",
    ),
    (
        (
            "What is the best batching strategy?",
            "Which batching strategy is best?",
            "Which strategy is the best?",
            "What is the fastest batching strategy?",
        ),
        "It depends on the model. Continuous batching is best for language models, dynamic batching for models that "
        "answer in one step, and static batching for offline jobs. Chairlift can serve the same model with each of "
        "them, so you can measure it.",
    ),
    (
        ("What is the meaning of life?", "What's the meaning of life?"),
        "To go up, enjoy the view, and make room for the next rider.",
    ),
    (
        ("Do you like mountains?", "Do you like the mountains?", "Do you like snow?"),
        "Yes, I like the mountains very much. The air is clear there, and the lifts teach us all about batching.",
    ),
    (
        ("Repeat after me: hello", "Say hello", "Say hello."),
        "Hello!",
    ),
]

_SYLLABLES = (
    "ba be bo da di dor el fa gri hal ik ja ka lan lo mar mi na nor o pa per qua ra ri sa sel ta tu va vo wen zu"
).split()


def made_up_name(rng: random.Random) -> str:
    """A name of nothing, in small letters."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
