-- weights_unused: list which weights are stored and nothing refers to, of those that something has ceased to
-- refer to, and of `args.refs`. Answers how many of the former it looked at, then their rows.
-- needs: weights_in_use, ages
-- What is listed, or in use for a while (by a load, by a checkpoint that expires), is looked at again later.
local released = unpack(KEYS)
local args, unused = cjson.decode(ARGV[1]), {}

local function is_used_for_a_while(ref)
  for _, user in ipairs(redis.call('SMEMBERS', 'cotrain:weights:' .. ref .. ':users')) do
    local kind, name = string.sub(user, 1, 1), string.sub(user, 3)
    if kind == 'l' or kind == 'c' and redis.call('PTTL', 'cotrain:checkpoint:' .. name) >= 0 then
      return true
    end
  end
  return false
end

local function look_at(ref)
  local row = redis.call('HMGET', 'cotrain:weights:' .. ref, 'record', 'digest', 'size', 'optimizer')
  if not row[2] or row[2] == '' then
    return false -- forgotten, or to be released once they are stored
  end
  if in_use(ref) then
    return is_used_for_a_while(ref)
  end
  unused[#unused + 1] = row
  return true
end

redis.call('ZREM', released, '') -- a full Redis stops no script that has removed something
local due = redis.call('ZRANGEBYSCORE', released, '-inf', clock_ms(), 'LIMIT', 0, args.most)
for _, ref in ipairs(due) do
  if look_at(ref) then
    redis.call('ZADD', released, clock_in(args.again_ms), ref)
  else
    redis.call('ZREM', released, ref)
  end
end
for _, ref in ipairs(args.refs) do
  look_at(ref)
end
return { #due, unpack(unused) }
