-- checkpoint_delete: take a name away. The weights under it are deleted when nothing else uses them.
-- needs: checkpoint_index
local checkpoint = unpack(KEYS)
local args = cjson.decode(ARGV[1])

local text = redis.call('GET', checkpoint)
if not text or cjson.decode(text).tenant ~= args.tenant then
  return 'GONE'
end
redis.call('DEL', checkpoint)
strike_checkpoint(args.tenant, args.member)
return 'OK'
