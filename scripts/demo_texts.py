"""The demo model's prose: what it can explain, compare, recommend and tell."""

# (names that a question may use, answer, answer to "tell me more" or "")
TOPICS: list[tuple[tuple[str, ...], str, str]] = [
    (
        ("continuous batching", "in-flight batching", "iteration-level batching"),
        "Continuous batching works like a chairlift that never stops. At every step of the model, finished requests "
        "get off and waiting requests get on. Nobody waits for the slowest answer in the group, so the device stays "
        "busy and the first token comes quickly. It is the best choice for language models, because their answers "
        "have very different lengths.",
        "The scheduler looks at the line before every single step. It gives each running request its next tokens, "
        "and lets new requests board while there are free seats, tokens and KV cache blocks. If memory runs short, "
        "the youngest request is preempted and comes back later.",
    ),
    (
        ("static batching",),
        "Static batching works like a cable car that waits until it is full. The server collects a fixed number of "
        "requests, runs them together, and starts the next group only when all of them are done. It gives high "
        "throughput for offline jobs, but early requests wait long and short answers wait for the longest one.",
        "The cost of static batching is idle seats. When one answer has ten words and another has five hundred, the "
        "short one leaves an empty seat for hundreds of steps. For batch jobs at night nobody minds, because only "
        "the total time counts.",
    ),
    (
        ("dynamic batching",),
        "Dynamic batching works like a gondola. It leaves when it is full or when its time is up, whichever comes "
        "first. You set the largest batch and the longest wait, for example 32 requests and 5 milliseconds. It suits "
        "models that answer in one step, such as embedding models, classifiers and image models.",
        "A longer wait gives fuller batches and more throughput, and a shorter wait gives less delay. When the "
        "traffic is heavy, batches fill up before the time is up, so the wait hardly matters. When the traffic is "
        "light, every request pays the wait.",
    ),
    (
        ("no batching", "serving without batching", "batch size one"),
        "No batching means that requests are served one at a time, in the order in which they came. It is simple and "
        "gives the lowest delay when there is little traffic. But the device reads all the weights for a single "
        "request, so most of its power is wasted and the line grows quickly under load.",
        "",
    ),
    (
        ("batching", "request batching"),
        "Batching means running several requests through the model together. Reading the weights from memory is the "
        "expensive part, and a batch shares that cost among all its requests. There are three common strategies: "
        "static, dynamic and continuous batching. They differ in when a waiting request may board.",
        "Think of lifts in the mountains. A cable car waits until it is full, which is static batching. A gondola "
        "leaves when it is full or when its time is up, which is dynamic batching. A chairlift never stops, which is "
        "continuous batching.",
    ),
    (
        ("the KV cache", "a KV cache", "KV cache", "the key-value cache"),
        "The KV cache keeps the keys and values of all tokens that the model has already seen. Thanks to it, each "
        "new token needs only one small step instead of reading the whole text again. It grows with every token, so "
        "memory decides how many requests can run at the same time.",
        "Chairlift cuts the KV cache into blocks of equal size. A request takes a new block only when its last one "
        "is full, so very little memory is wasted. Requests that begin with the same text can share their first "
        "blocks.",
    ),
    (
        ("prefill", "the prefill phase", "prompt processing"),
        "Prefill is the first part of a request, when the model reads the prompt. All tokens of the prompt are "
        "computed together, so prefill is limited by arithmetic. It ends with the first token of the answer, and so "
        "it sets the time to first token.",
        "",
    ),
    (
        ("decode", "decoding", "the decode phase"),
        "Decode is the second part of a request, when the model writes the answer one token at a time. Every step "
        "has to read all the weights for only one token per request, so decode is limited by memory bandwidth. That "
        "is why running many requests together makes such a big difference.",
        "",
    ),
    (
        ("TTFT", "time to first token", "the time to first token"),
        "TTFT is the time to first token. It runs from the moment a request arrives until its first token is sent. "
        "It holds the time in the queue and the time of the prefill, and users feel it as the pause before the "
        "answer begins.",
        "",
    ),
    (
        ("TPOT", "time per output token", "inter-token latency", "ITL"),
        "TPOT is the time per output token, and ITL is the time between two tokens. They say how fast an answer "
        "flows once it has begun. A person reads about five to ten tokens a second, so 100 milliseconds per token "
        "already feels smooth.",
        "",
    ),
    (
        ("preemption", "preempting a request"),
        "Preemption means taking a running request off the device for a while, because the KV cache is full. Its "
        "blocks are freed for the others, and the request goes back to the front of the line. When it boards again, "
        "its tokens are computed once more. The answer is the same, it only comes later.",
        "",
    ),
    (
        ("paged attention", "PagedAttention"),
        "Paged attention stores the KV cache in small blocks, like the pages of a computer's memory. Each request "
        "has a block table that says where its tokens are. The blocks need not lie side by side, so memory is not "
        "lost to gaps and more requests fit on the device.",
        "",
    ),
    (
        ("prefix caching", "the prefix cache", "a prefix cache"),
        "Prefix caching keeps the KV cache of texts that were seen before. When a new request begins with the same "
        "tokens, for example the same system prompt, those tokens are not computed again. It saves work and makes "
        "the first token come sooner.",
        "",
    ),
    (
        ("chunked prefill",),
        "Chunked prefill cuts a long prompt into pieces. Each step computes one piece next to the decode tokens of "
        "the other requests. In this way a long prompt does not freeze the answers that are already flowing.",
        "",
    ),
    (
        ("speculative decoding",),
        "Speculative decoding guesses several tokens ahead with a cheap method and lets the large model check all of "
        "them in one step. Right guesses are kept and wrong ones are thrown away. The answer stays the same, but it "
        "often comes two or three times faster.",
        "",
    ),
    (
        ("late binding",),
        "Late binding means that the members of a batch are chosen only when the device is free. A batch that is "
        "sealed too early misses the requests that arrive a moment later. Choosing late keeps batches full and waits "
        "short.",
        "",
    ),
    (
        ("throughput",),
        "Throughput is how much work a server finishes in a second, for example requests or tokens per second. "
        "Larger batches raise it, because the weights are read once for many requests. But throughput alone says "
        "nothing about how long a single user waits.",
        "",
    ),
    (
        ("latency",),
        "Latency is the time that one request takes from its arrival to its answer. It has two parts: waiting in the "
        "queue and running on the device. For a chat, two numbers matter most: the time to first token and the time "
        "between tokens.",
        "",
    ),
    (
        ("goodput",),
        "Goodput counts only the requests that were answered in time. A server can have a high throughput and still "
        "a low goodput, when most answers come too late. It is the number to watch when you have promised a response "
        "time.",
        "",
    ),
    (
        ("an SLO", "a service level objective", "the SLO"),
        "An SLO is a service level objective, a promise about response times. For example, 99 of 100 requests shall "
        "get their first token within 200 milliseconds. A good server refuses a request early when it can't keep the "
        "promise.",
        "",
    ),
    (
        ("load shedding", "shedding"),
        "Load shedding means refusing some requests early when the server has too much to do. The client gets a "
        "clear error and the advice to try again later. The other requests stay fast, which is better than being "
        "slow for all.",
        "",
    ),
    (
        ("backpressure", "back pressure"),
        "Backpressure tells the sender to slow down when the receiver can't keep up. In a server every queue has a "
        "limit, and when it is full, new requests are refused with status 429. Without it, memory fills up and every "
        "answer comes too late.",
        "",
    ),
    (
        ("quantization", "quantisation"),
        "Quantization stores the weights of a model with fewer bits, for example 8 or 4 instead of 16. The model "
        "becomes smaller, and decoding becomes faster because there is less to read. The answers change a little, so "
        "check the quality before you use it.",
        "",
    ),
    (
        ("a token", "tokens", "a token in a language model"),
        "A token is a small piece of text, such as a word, part of a word or a sign. A tokenizer cuts text into "
        "tokens, and a language model writes its answer one token at a time. Servers count their work in tokens.",
        "",
    ),
    (
        ("a tokenizer", "tokenization", "a tokeniser"),
        "A tokenizer cuts text into tokens and turns them into numbers that the model can read. At the end it turns "
        "the numbers of the answer back into text. My own tokenizer knows about fifteen hundred tokens.",
        "",
    ),
    (
        ("temperature", "the temperature", "sampling temperature"),
        "The temperature says how freely a model chooses the next token. At zero it always takes the likeliest one, "
        "so the answer is the same every time. Higher values give more variety, and also more mistakes.",
        "",
    ),
    (
        ("streaming", "token streaming"),
        "Streaming means sending each token to the client as soon as it is ready. The user can begin to read while "
        "the rest is still being written. The whole answer takes the same time, but it feels much faster.",
        "",
    ),
    (
        ("a scheduler", "the scheduler"),
        "The scheduler decides which requests run in the next step, and how many tokens each of them gets. It looks "
        "at the free seats, the token budget and the free blocks of the KV cache. In Chairlift, every decision comes "
        "with a reason that you can read.",
        "",
    ),
    (
        ("inference serving", "model serving", "an inference server"),
        "Inference serving means running a trained model so that others can use it. A server takes requests, puts "
        "them into batches, runs the model and sends the answers back. The art is to keep the device busy without "
        "letting anybody wait too long.",
        "",
    ),
    (
        ("a language model", "a large language model", "an LLM"),
        "A language model is a program that has learned to continue text. It reads a prompt and predicts the next "
        "token, again and again, until the answer is complete. Large models have billions of weights, and I have "
        "only about three million.",
        "",
    ),
    (
        ("an embedding", "an embedding model", "embeddings"),
        "An embedding is a list of numbers that stands for the meaning of a text. Texts with a similar meaning get "
        "similar numbers, which is useful for search. An embedding model answers in one step, so dynamic batching "
        "suits it well.",
        "",
    ),
    (
        ("a GPU", "GPUs"),
        "A GPU is a processor that does very many simple calculations at the same time. That suits neural networks, "
        "which are mostly large multiplications. A GPU is only fast when it gets enough work, and this is why "
        "batching matters so much.",
        "",
    ),
    (
        ("padding", "padding in a batch"),
        "Padding fills short inputs with empty tokens until all inputs of a batch have the same length. The device "
        "computes the empty tokens too, so padding wastes time. Putting inputs of similar length together keeps the "
        "waste small.",
        "",
    ),
    (
        ("Chairlift", "the Chairlift server", "the Chairlift project"),
        "Chairlift is an inference server that runs every model with the batching strategy that suits it: none, "
        "static, dynamic or continuous. It speaks the OpenAI API, and a live page shows the batches as they run. The "
        "name comes from the lift that never stops.",
        "All strategies share one loop and differ only in their boarding rule. The scheduler decides, the runner "
        "computes, and the engine connects the two. So you can serve the same model under all four strategies and "
        "compare them honestly.",
    ),
    (
        ("a chairlift", "chairlifts", "a ski lift"),
        "A chairlift is a mountain lift with many chairs on a moving rope. It never stops: people get on and off at "
        "every chair. In the same way, continuous batching lets requests join and leave at every step.",
        "",
    ),
    (
        ("a gondola", "gondolas"),
        "A gondola is a small cabin that hangs from a rope. It leaves when it is full or when its time is up. "
        "Dynamic batching follows the same rule with requests in place of riders.",
        "",
    ),
    (
        ("a cable car", "cable cars"),
        "A cable car is a large cabin that carries many people up a mountain. It waits in the station until it is "
        "full, and then all ride together. Static batching follows the same rule with requests in place of riders.",
        "",
    ),
]

_DIFFERENCES: list[tuple[str, str, str]] = [
    (
        "static batching",
        "dynamic batching",
        "Static batching waits until the batch is full, however long that takes. Dynamic batching also leaves when "
        "its time is up, so no request waits too long. The cable car waits for all seats, and the gondola looks at "
        "the clock.",
    ),
    (
        "static batching",
        "continuous batching",
        "Static batching keeps the same group of requests until all of them are done. Continuous batching lets "
        "requests join and leave at every step. The cable car has empty seats when short answers are done, and the "
        "chairlift fills them at once.",
    ),
    (
        "dynamic batching",
        "continuous batching",
        "Dynamic batching decides once per batch: it leaves when it is full or when its time is up. Continuous "
        "batching decides again at every step of the model. The gondola suits models that answer in one step, and "
        "the chairlift suits language models that take many.",
    ),
    (
        "prefill",
        "decode",
        "Prefill reads the whole prompt at once and is limited by arithmetic. Decode writes one token at a time and "
        "is limited by memory bandwidth. Prefill sets the time to first token, and decode sets the speed of the "
        "answer.",
    ),
    (
        "latency",
        "throughput",
        "Latency is how long one request takes, and throughput is how many requests are finished in a second. Larger "
        "batches raise throughput but can make each request wait longer. A good server finds the balance.",
    ),
    (
        "a gondola",
        "a chairlift",
        "A gondola leaves when it is full or when its time is up. A chairlift never stops, and riders get on and off "
        "at every chair. The first is dynamic batching, and the second is continuous batching.",
    ),
]
DIFFERENCES: list[tuple[tuple[str, str], str]] = [
    entry for a, b, answer in _DIFFERENCES for entry in (((a, b), answer), ((b, a), answer))
]

# (what is served, advice)
ADVICE: list[tuple[tuple[str, ...], str]] = [
    (
        ("a language model", "an LLM", "a chat model", "a chatbot", "text generation"),
        "Use continuous batching for a language model. Its answers have very different lengths, and continuous "
        "batching fills every seat as soon as it is free. So the device stays busy and the first token comes quickly.",
    ),
    (
        ("an embedding model", "embeddings", "a classifier", "an image model", "a vision model"),
        "Use dynamic batching for a model that answers in one step. Set the largest batch that is still fast, and a "
        "wait of a few milliseconds. Then requests that arrive together also run together.",
    ),
    (
        ("offline jobs", "a batch job", "a large file of prompts", "a nightly job"),
        "Use static or continuous batching for offline jobs. Nobody waits for a single answer, so only the total "
        "time counts. Chairlift reads a file of prompts, shows a progress bar and goes on where it stopped.",
    ),
    (
        ("one user", "a single user", "very little traffic"),
        "With a single user, batching hardly matters. Serve the requests one at a time, or leave continuous batching "
        "on, because it costs nothing when the line is empty.",
    ),
]

# (what the story is about, story)
STORIES: list[tuple[tuple[str, ...], str]] = [
    (
        ("", "about a mountain", "about mountains", "about the mountains", "about a chairlift"),
        "Once upon a time there was an old chairlift on a high mountain. Every morning it woke up before the sun and "
        'began to turn. "Why do you never stop?" asked the cable car in the valley. "Because there is always '
        'somebody who wants to go up," said the chairlift. The cable car laughed and waited for more people. But in '
        "the evening, when they counted their riders, the chairlift had carried twice as many. From that day on, the "
        "cable car waited a little less.",
    ),
    (
        ("about a fox", "about an animal", "about animals"),
        "A young fox lived at the edge of the snow. One night he saw the lights of the lift and wanted to ride to "
        "the top. He sat down on a chair, very quietly, and nobody saw him. Up there the stars were so close that he "
        "could almost touch them. The fox looked at them for a long time. Then he walked home through the fresh "
        "snow, and he told nobody, because some things are best kept in the heart.",
    ),
    (
        ("about a goat", "about a mountain goat"),
        "A goat named Flora climbed every rock that she could find. One day she met a goat who had never left the "
        'valley. "Come up with me," said Flora, "the grass is sweeter there." They went slowly, one stone after the '
        'other. At the top they looked down at the small houses. "It is the same world," said the other goat, "but '
        'now I can see all of it."',
    ),
    (
        ("about snow", "about a snowflake", "about winter"),
        'A snowflake fell from a grey cloud and was afraid. "I am so small," she said, "I will be lost." But all '
        "around her other snowflakes were falling, thousands of them, and together they made the mountain white. In "
        'the morning the children came with their sledges and laughed. "Look," said the snowflake, "all of us '
        'together are the winter."',
    ),
    (
        ("about a lift operator", "about an old man", "about people"),
        "Old Martin worked at the lift for forty years. He knew every rider by name. When somebody was sad, he "
        'slowed the chair a little and said a kind word. On his last day the whole village came to ride. "Who will '
        'take care of us now?" they asked. Martin smiled and gave his cap to a girl who had always asked how the '
        "lift works.",
    ),
    (
        ("about a computer", "about a robot", "about a server"),
        "A small computer stood in a hut on the mountain and counted the riders. It was proud, because it never made "
        "a mistake. One day a storm came, and the power went out. The people in the hut lit a candle and counted by "
        "hand, and they sang while they counted. When the power was back, the computer had only one wish: it wanted "
        "to learn to sing.",
    ),
    (
        ("about a river", "about water", "about spring"),
        'High up under a glacier a river was born. It was so thin that a mouse could jump over it. "Where are you '
        'going?" asked the stones. "Down," said the river, "there must be more of us." And really, from every side '
        "other rivers came and joined it. When they reached the valley, they were so strong that they carried boats, "
        "and each drop remembered the mountain.",
    ),
]

# Plain paragraphs, for completions without a chat.
PARAGRAPHS: list[str] = [
    "The mountain was quiet in the early morning. The first chairs of the lift came out of the fog, one after the "
    "other, and the snow on the trees was blue. A man with a red cap opened the small station and swept the snow "
    "from the steps. Then he pulled the lever, and the long rope began to move.",
    "A server is like a lift station. Requests come in and wait in a line. The scheduler decides who may board, the "
    "model carries them up, and the answers come down again. If the line grows too long, it is better to say so at "
    "the gate than to let people wait in the cold.",
    "The sky is blue, the grass is green and the snow is white. In the evening the mountains turn red for a few "
    "minutes. Then the night comes, and the stars stand over the valley.",
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. The months of the "
    "year are January, February, March, April, May, June, July, August, September, October, November and December.",
    "In the beginning, every model was served alone. One request came, the model ran, and the answer went out. Then "
    "more people came, and the line grew. So somebody had an idea: let several requests ride together. That was the "
    "first batch, and the beginning of this story.",
    "It was a cold day in January when the new lift was opened. The whole village stood at the station. The band "
    "played, the mayor spoke for much too long, and the children ran to the first chair. When they came down again, "
    "their cheeks were red and they shouted: again!",
]
