"""Tables of the words and commands used in answers."""

from __future__ import annotations

from fractions import Fraction

#: Units: name -> (factor, dimension). Spellings below lead to these names. A factor is exact in the dimension's unit.
UNITS: dict[str, tuple[Fraction, str]] = {}
#: Spelling (in lower case, except symbols) -> unit.
UNIT_SPELLINGS: dict[str, str] = {}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _unit(name: str, factor: Fraction | int | str, dimension: str, *spellings: str) -> None:
    UNITS[name] = (Fraction(factor), dimension)
    for spelling in (name, *spellings):
        UNIT_SPELLINGS[spelling] = name


for _prefix, _word, _power in (
    ("", "", 0), ("k", "kilo", 3), ("c", "centi", -2), ("m", "milli", -3), ("d", "deci", -1),
    ("n", "nano", -9), ("M", "mega", 6), ("G", "giga", 9), ("\\mu", "micro", -6),
):  # fmt: skip
    _scale = Fraction(10) ** _power
    for _short, _base, _long in (
        ("m", "length", ("meter", "metre")),
        ("s", "time", ("second",)),
        ("g", "mass", ("gram",)),
        ("L", "volume", ("liter", "litre")),
        ("J", "energy", ("joule",)),
        ("W", "power", ("watt",)),
        ("N", "force", ("newton",)),
        ("V", "voltage", ("volt",)),
        ("Hz", "frequency", ("hertz",)),
        ("Pa", "pressure", ("pascal",)),
        ("A", "current", ("ampere", "amp")),
        ("\\Omega", "resistance", ("ohm",)),
        ("mol", "amount", ("mole",)),
        ("eV", "electron energy", ("electronvolt",)),
    ):
        _names = [f"{_word}{_noun}{ending}" for _noun in _long for ending in ("", "s")]
        _unit(_prefix + _short, _scale, _base, *_names, *(["sec", "secs"] if _prefix + _short == "s" else []))
for _spelling in ("l", "ml", "cl", "dl"):
    UNIT_SPELLINGS[_spelling] = _spelling[:-1] + "L"

_unit("in", Fraction(254, 10000), "length", "inch", "inches")
_unit("ft", Fraction(3048, 10000), "length", "foot", "feet")
_unit("yd", Fraction(9144, 10000), "length", "yard", "yards", "yds")
_unit("mi", Fraction(1609344, 1000), "length", "mile", "miles")
_unit("min", 60, "time", "minute", "minutes", "mins")
_unit("h", 3600, "time", "hour", "hours", "hr", "hrs")
_unit("day", 86400, "time", "days")
_unit("week", 604800, "time", "weeks")
_unit("month", 1, "months", "months")
_unit("year", 1, "years", "years", "yr", "yrs", "year old", "years old")
_unit("lb", 1, "pounds of mass", "lbs", "pound", "pounds")
_unit("oz", 1, "ounces", "ounce", "ounces")
_unit("ton", 1, "tons", "tons", "tonne", "tonnes")
_unit("gal", 1, "gallons", "gallon", "gallons")
_unit("qt", 1, "quarts", "quart", "quarts")
_unit("pt", 1, "pints", "pint", "pints")
_unit("acre", 1, "acres", "acres")
_unit("cup", 1, "cups", "cups")
_unit("cal", 1, "calories", "calorie", "calories")
_unit("kcal", 1000, "calories", "kilocalorie", "kilocalories")
_unit("degC", 1, "Celsius", "degrees Celsius", "degree Celsius")
_unit("degF", 1, "Fahrenheit", "degrees Fahrenheit", "degree Fahrenheit")
_unit("K", 1, "kelvin", "kelvin", "kelvins")
_unit("rad", 1, "radians", "radian", "radians")
_unit("bit", 1, "bits", "bits")
_unit("byte", 8, "bits", "bytes")
_unit("unit", 1, "", "units", "linear units", "square units", "square unit", "sq units", "cubic units", "cubic unit")
_unit("dollar", 100, "US money", "dollars", "USD", "US dollars", "US dollar", "buck", "bucks", "\\$")
_unit("cent", 1, "US money", "cents")
_unit("euro", 1, "euros", "euros", "EUR", "\u20ac")
_unit("GBP", 1, "British pounds", "\u00a3")
_unit("yen", 1, "yen", "JPY", "\u00a5")
_unit("yuan", 1, "yuan", "RMB", "CNY")
_unit("rupee", 1, "rupees", "rupees", "Rs", "INR", "\u20b9")
_unit("peso", 1, "pesos", "pesos")
_unit("pence", 1, "pence", "penny", "pennies")

#: Speeds with a name: numerator and denominator.
SPEEDS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "kmph": ("km", "h"), "fps": ("ft", "s")}

#: Nouns of things that are counted: `5\text{ apples}` equals 5, but not 5 oranges. Other words are part of the answer,
#: but `stated_value` leaves out a noun after a number if the reference is a number.
COUNTED = (
    "apple animal arrangement ball bag bead bean bird block board book bottle bowl box|boxes boy brick bus|buses "
    "cake candle candy|candies car card case cat chair chicken child|children choice class|classes coin combination "
    "cookie cow coupon crayon customer cube digit dog donkey door edge egg element employee envelope face factor "
    "fish flower fruit function game gift girl glass|glasses goal group guest horse house integer item kid lamp "
    "line letter magnet man|men marble match|matches member mark method mouse|mice muffin number nut orange order "
    "outcome owner page pair|pairs pancake paper participant passenger path pear pen pencil penguin people|person "
    "permutation pet photo piece pizza player plant plate point pole polygon possibility|possibilities "
    "potato|potatoes present prize problem question rabbit racer rectangle root room rose round row "
    "sandwich|sandwiches score seat sheep shell ship shirt shoe side slice sock solution song square stamp star "
    "step sticker stick stone story|stories student subset sweet table task teacher team term test ticket tile time "
    "toy train tree triangle trip truck turn value vehicle vertex|vertices visitor vote way window woman|women word "
    "worker year"
)
for _entry in COUNTED.split():
    _one, _, _many = _entry.partition("|")
    if _one not in UNIT_SPELLINGS and _one != "pair":
        _unit(_one, 1, f"counted {_one}", _many or f"{_one}s")

#: Short units that are also read in formulas, right after a number. Units of more than three letters and SPEEDS always
#: are; other short ones only after white space, or in text.
COMMON_UNITS = _words("cm mm km kg mg ml mL ft lb lbs oz mph kph hr hrs min sec")
#: Single letters that are units after a number and white space, outside of text.
LETTER_UNITS = frozenset("msgL")

MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_NUMERALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
NUMERALS = {word: value for value, word in enumerate(_NUMERALS.split())} | {
    "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
#: Words after a number that change or deny it. Other lower-case words there, except ordinals and words of one or two
#: letters, name the counted things.
CHANGING = _words(
    "half halves third thirds quarter quarters squared cubed factorial doubled tripled halved dozen dozens score "
    "scores gross pair pairs couple couples hundreds thousands millions billions trillions lakh lakhs crore crores "
    "modulo less fewer more plus minus above below over under negative positive base binary octal decimal inverse "
    "reciprocal opposite imaginary percentile approximately approx about not none never wrong false incorrect"
)
NO_SOLUTION = frozenset({"no solution", "no solutions", "no real solution", "no real solutions", "empty set"})
ALL_REALS = frozenset({"all real numbers", "all reals", "the real numbers", "real numbers"})

FUNCTIONS = _words(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc asin acos atan arcsinh "
    "arccosh arctanh ln log lg exp max min gcd lcm abs sgn cis Re Im det floor ceil"
)
#: Words that are read as LaTeX commands even without a backslash.
PLAIN_COMMANDS = FUNCTIONS | _words("pi theta alpha beta gamma lambda infty infinity inf sqrt cup") - {
    "Re",
    "Im",
}
SEPARATORS = frozenset({"or", "and"})

GREEK = _words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell nabla "
    "partial aleph prime star"
)
ACCENTS = _words(
    "overline bar vec hat widehat tilde widetilde dot ddot overrightarrow overleftrightarrow underline mathring "
    "widebar overset underset overbrace underbrace"
)
ALPHABETS = frozenset({"mathbb", "Bbb", "mathcal", "mathscr", "mathfrak"})
TEXT_COMMANDS = _words(
    "text textbf textit textrm textsf texttt textup textnormal mbox hbox emph mathrm rm operatorname mathop mathsf "
    "mathtt mathit textmd textsc"
)
#: Commands that change only the style, with or without braces after them.
LOOKS = _words(
    "mathbf boldsymbol bm bf pmb displaystyle textstyle scriptstyle limits nolimits left right big Big bigg Bigg bigl "
    "bigr Bigl Bigr biggl biggr Biggl Biggr middle boxed fbox mathstrut strut it mathnormal ensuremath "
    "large Large LARGE huge Huge small"
)
SPACES = frozenset(
    ["\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\qquad", "\\thinspace", "\\enspace", "\\hfill", "\\>"]
)
MATRICES = _words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")
LINES = _words("aligned align alignedat gathered gather split equation eqnarray")

#: LaTeX command -> the command or symbol with the same meaning.
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\lt": "<",
    "\\gt": ">", "\\ne": "!=", "\\neq": "!=", "\\times": "*", "\\cdot": "*", "\\ast": "*", "\\div": "/",
    "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\lVert": "\\|", "\\rVert": "\\|", "\\Vert": "\\|",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\colon": ":", "\\%": "%",
    "\\varnothing": "\\emptyset", "\\bigcup": "\\cup", "\\bigcap": "\\cap", "\\backslash": "\\setminus",
    "\\smallsetminus": "\\setminus", "\\ldots": "\\dots", "\\cdots": "\\dots", "\\dotsc": "\\dots", "\\dotsb": "\\dots",
    "\\vdots": "\\dots", "...": "\\dots", "\\lor": "or", "\\vee": "or", "\\land": "and", "\\wedge": "and", "\\&": "and",
    "\\rightarrow": "\\to", "\\longrightarrow": "\\to", "->": "\\to", "\\infinity": "\\infty", "\\inf": "\\infty",
    "\\degree": "\\degrees", "\\asin": "\\arcsin", "\\acos": "\\arccos", "\\atan": "\\arctan",
    "\\thickapprox": "\\approx",
    "**": "^", "==": "=", "\\triangleq": "=", "\\coloneqq": "=", ":=": "=", "\\lnot": "\\neg", "\\newline": "\\\\",
    "\\cr": "\\\\", "\\varepsilon": "\\epsilon", "\\varphi": "\\phi", "\\vartheta": "\\theta", "\\Re": "\\Re",
    "\\dotsm": "\\dots", "\\doteq": "=", "\\implies": "\\Rightarrow", "\\iff": "\\Leftrightarrow", "\\euro": "\u20ac",
    "\\pounds": "\u00a3", "\\textdollar": "\\$", "\\textdegree": "\\degrees", "\\complement": "\\complement",
}  # fmt: skip
RELATIONS = frozenset(
    ["=", "<", ">", "<=", ">=", "!=", "\\in", "\\notin", "\\ni", "\\equiv", "\\approx", "\\sim", "\\simeq", "\\cong",
     "\\subset", "\\subseteq", "\\supset", "\\supseteq", "\\to", "\\propto", "\\perp", "\\parallel", "\\mapsto",
     "\\Rightarrow", "\\Leftrightarrow", "\\subsetneq", "\\ll", "\\gg", "\\prec", "\\succ", "\\nmid"]
)  # fmt: skip

_GREEK_LETTERS = (  # in the order of the characters below; mu and phi have two each
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu mu nu xi pi rho sigma tau phi phi chi psi omega "
    "Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega"
)
#: Characters -> LaTeX.
CHARACTERS = str.maketrans(
    {
        "\u221a": "\\sqrt ", "\u221b": "\\cbrt ", "\u00b0": "\\degrees ", "\u00ba": "\\degrees ", "\u00d7": "\\times ",
        "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u2219": "\\cdot ", "\u00f7": "\\div ", "\u2212": "-", "\u2013": "-",
        "\u2014": "-", "\u2010": "-", "\u2011": "-", "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u221e": "\\infty ",
        "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2209": "\\notin ", "\u2264": "\\le ",
        "\u2265": "\\ge ", "\u2a7d": "\\le ", "\u2a7e": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ",
        "\u2261": "\\equiv ", "\u2205": "\\emptyset ", "\u00d8": "\\emptyset ", "\u2216": "\\setminus ",
        "\u2282": "\\subset ", "\u2286": "\\subseteq ", "\u2200": "\\forall ", "\u2203": "\\exists ",
        "\u2192": "\\to ", "\u2223": "\\mid ", "\u2225": "\\parallel ", "\u22a5": "\\perp ", "\u2220": "\\angle ",
        "\u25b3": "\\triangle ", "\u2227": "\\land ", "\u2228": "\\lor ", "\u00ac": "\\neg ", "\u2032": "'",
        "\u2019": "'", "\u2018": "'", "\u2033": "''", "\u2026": "\\dots ", "\u22ef": "\\dots ", "\u27e8": "\\langle ",
        "\u27e9": "\\rangle ", "\u2308": "\\lceil ", "\u2309": "\\rceil ", "\u230a": "\\lfloor ",
        "\u230b": "\\rfloor ", "\u211d": "\\mathbb{R} ", "\u2124": "\\mathbb{Z} ", "\u2115": "\\mathbb{N} ",
        "\u211a": "\\mathbb{Q} ", "\u2102": "\\mathbb{C} ", "\u2009": "\\,", "\u202f": "\\,", "\u2061": "",
        "\u200b": "", "\ufeff": "", "\u2062": "", "\u00a0": " ", "\u2211": "\\sum ", "\u220f": "\\prod ",
        "\u222b": "\\int ", "\u2202": "\\partial ", "\u2207": "\\nabla ", "\u201c": '"', "\u201d": '"',
        "\u3002": ".", "\uff0c": ",", "\u2080": "_0",
        "\u00bc": "\\frac{1}{4}", "\u00bd": "\\frac{1}{2}", "\u00be": "\\frac{3}{4}", "\u2153": "\\frac{1}{3}",
        "\u2154": "\\frac{2}{3}", "\u2155": "\\frac{1}{5}", "\u2156": "\\frac{2}{5}", "\u2157": "\\frac{3}{5}",
        "\u2158": "\\frac{4}{5}", "\u2159": "\\frac{1}{6}", "\u215a": "\\frac{5}{6}", "\u215b": "\\frac{1}{8}",
        "\u215c": "\\frac{3}{8}", "\u215d": "\\frac{5}{8}", "\u215e": "\\frac{7}{8}", "\u2150": "\\frac{1}{7}",
        "\u2151": "\\frac{1}{9}", "\u2152": "\\frac{1}{10}",
        **dict(zip("\u03b1\u03b2\u03b3\u03b4\u03b5\u03b6\u03b7\u03b8\u03ba\u03bb\u03bc\u00b5\u03bd\u03be\u03c0\u03c1"
                   "\u03c3\u03c4\u03c6\u03d5\u03c7\u03c8\u03c9\u0393\u0394\u0398\u039b\u03a0\u03a3\u03a6\u03a8\u03a9",
                   (f"\\{name} " for name in _GREEK_LETTERS.split()),
                   strict=True)),
    }
)  # fmt: skip
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f\u2071\u207d\u207e\u02e3"
_LOWERED = "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u2099\u1d62\u2096"
RAISED = str.maketrans(dict(zip(_RAISED, "0123456789+-ni()x", strict=True)))
LOWERED = str.maketrans(dict(zip(_LOWERED, "0123456789nik", strict=True)))
