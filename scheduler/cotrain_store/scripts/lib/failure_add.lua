-- failure_add: count a failed request of a tenant, in the minute and in total, and keep its message.
-- The pool's minute has the key `minute`. The encoded failure is `result`.
local function add_failure(minute, tenant, request, result, ttl_s)
  local pool, start = string.match(minute, '{(.*)}:minute:(%d+)$')
  local counts = 'cotrain:failures:' .. start
  local message = cjson.decode(string.sub(result, 2)).error
  local last = math.min(#message, 600)
  -- a cut within a character would store invalid UTF-8
  while last < #message and string.byte(message, last + 1) >= 0x80 and string.byte(message, last + 1) < 0xC0 do
    last = last - 1
  end
  message = string.sub(message, 1, last)
  redis.call('HINCRBY', counts, 'failed|' .. tenant, 1)
  redis.call('EXPIRE', counts, ttl_s)
  redis.call('HINCRBY', 'cotrain:failures:totals', pool .. '|' .. tenant, 1)
  redis.call('HSET', 'cotrain:failures:newest', 'failed|' .. tenant,
    cjson.encode({ at = tonumber(redis.call('TIME')[1]), request = request, message = message }))
  redis.call('EXPIRE', 'cotrain:failures:newest', ttl_s)
end
